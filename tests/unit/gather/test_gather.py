"""Gathering: order, budgets of failures, callbacks, cancellation."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from art.client.terminal import progress_bar
from art.errors import RolloutError, TrajectoryError
from art.faults import FaultWatch
from art.gather import (
    GatherContext,
    gather_trajectories,
    gather_trajectory_groups,
    get_gather_context,
    set_gather_context,
    trajectory_group_batches,
    wrap_group_awaitable,
)
from art.trajectory import Trajectory, TrajectoryGroup


@pytest.fixture(autouse=True)
async def no_orphans() -> AsyncIterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert len(asyncio.all_tasks()) == 1


async def rollout(number: float, *, delay_s: float = 0.0, fail: bool = False) -> Trajectory:
    await asyncio.sleep(delay_s)
    if fail:
        raise ValueError(f"rollout {number}")
    return Trajectory(reward=float(number), metrics={"n": number})


def groups_of(rewards: list[list[float | None]]) -> Iterator[Any]:
    """`None` stands for a rollout that fails."""
    for group in rewards:
        yield TrajectoryGroup(rollout(r or 0, delay_s=0.002 * (r or 0), fail=r is None) for r in group)


def rewards_of(groups: list[TrajectoryGroup]) -> list[list[float]]:
    return [[trajectory.reward for trajectory in group] for group in groups]


async def gather(rewards: list[list[float | None]], **options: Any) -> list[TrajectoryGroup]:
    return await gather_trajectory_groups(groups_of(rewards), pbar_desc=None, **options)


async def test_groups_and_trajectories_keep_input_order() -> None:
    assert rewards_of(await gather([[3, 1], [0, 2]])) == [[3, 1], [0, 2]]


async def test_first_failure_raises_by_default_and_ends_the_rest() -> None:
    with pytest.raises(ValueError, match="rollout 0"):
        await gather([[9_000, None], [9_000]])


@pytest.mark.parametrize(("limit", "ok"), [(0, False), (1, False), (2, True), (0.4, False), (0.5, True), (9, True)])
async def test_budget_of_failures(limit: float, ok: bool) -> None:
    rewards: list[list[float | None]] = [[1, None], [None, 2]]
    if not ok:
        with pytest.raises(ValueError, match="rollout"):
            await gather(rewards, max_exceptions=limit)
        return
    groups = await gather(rewards, max_exceptions=limit)
    assert rewards_of(groups) == [[1], [2]]
    assert [len(group.exceptions) for group in groups] == [1, 1]


async def test_a_group_that_failed_as_a_whole_is_left_out_and_counted() -> None:
    seen = []

    async def after_each(group: TrajectoryGroup) -> TrajectoryGroup:
        seen.append(len(group))
        return group

    assert rewards_of(await gather([[None, None], [1]], max_exceptions=2, after_each=after_each)) == [[1]]
    assert seen == [1], "an empty group does not reach after_each"
    with pytest.raises(ValueError, match="rollout"):
        await gather([[None, None], [1]], max_exceptions=1)


async def test_after_each_may_drop_and_split() -> None:
    async def after_each(group: TrajectoryGroup) -> TrajectoryGroup | list[TrajectoryGroup] | None:
        match group.trajectories[0].reward:
            case 0:
                return None
            case 1:
                return [TrajectoryGroup([t]) for t in group]
        return group

    groups = await gather([[0, 5], [1, 6], [2, 7]], after_each=after_each)
    assert rewards_of(groups) == [[1], [6], [2, 7]]


async def test_error_in_after_each_ends_the_gather() -> None:
    async def after_each(group: TrajectoryGroup) -> None:
        raise KeyError("judge")

    with pytest.raises(KeyError, match="judge"):
        await gather([[0], [9_000]], after_each=after_each, max_exceptions=99)


async def scored(reward: float) -> Trajectory:
    return Trajectory(reward=reward)


async def test_a_reward_that_is_no_number_is_a_failure_of_its_rollout() -> None:
    def pending() -> list[Any]:
        return [
            TrajectoryGroup(scored(r) for r in (1.0, math.nan, 0.0)),
            TrajectoryGroup([Trajectory(reward=math.inf)]),
        ]

    with pytest.raises(RolloutError, match="which is no finite number"):
        await gather_trajectory_groups(pending(), pbar_desc=None)
    faults = FaultWatch()
    groups = await gather_trajectory_groups(pending(), pbar_desc=None, faults=faults)
    assert rewards_of(groups) == [[1.0, 0.0]]
    assert [error.type for error in groups[0].exceptions] == ["RolloutError"]
    assert faults.metrics()["data/infra_faults/RolloutError"] == 2
    assert rewards_of(await gather_trajectory_groups(pending(), pbar_desc=None, max_exceptions=2)) == [[1.0, 0.0]]


async def test_plain_coroutines_of_groups_and_finished_groups() -> None:
    async def scenario() -> TrajectoryGroup:
        return await TrajectoryGroup([rollout(1), rollout(2)])

    contexts = []

    async def spying() -> TrajectoryGroup:
        contexts.append(get_gather_context())
        return await scenario()

    groups = await gather_trajectory_groups(
        [spying(), TrajectoryGroup([Trajectory(reward=5)])],  # type: ignore[list-item]
        pbar_desc=None,
    )
    assert rewards_of(groups) == [[1, 2], [5]]
    assert contexts[0].metric_divisors["reward"] == 2, "counted once, not by the group and again by the gather"


async def test_cancelling_a_gather_cancels_every_rollout() -> None:
    cancelled = []

    async def slow() -> Trajectory:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        return Trajectory()

    work = gather_trajectory_groups([TrajectoryGroup(slow() for _ in range(3)) for _ in range(2)], max_exceptions=99)
    task = asyncio.create_task(work)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(cancelled) == 6


async def test_cancelled_error_of_a_rollout_is_no_failure_to_tolerate() -> None:
    async def cancels_itself() -> Trajectory:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await gather_trajectory_groups(
            [TrajectoryGroup([cancels_itself(), rollout(9_000)])], max_exceptions=99, pbar_desc=None
        )


CTRL_C = """
import asyncio, art.gather, art.trajectory
async def slow():
    print("started", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("cancelled", flush=True)
groups = lambda: (art.trajectory.TrajectoryGroup(slow() for _ in range(2)) for _ in range(2))
async def main():
    await art.gather.gather_trajectory_groups(groups(), max_exceptions=99, pbar_desc=None)
asyncio.run(main())
"""


def test_ctrl_c_ends_a_gather() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CTRL_C], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert out.count("cancelled") == 4
    assert "KeyboardInterrupt" in err
    assert "never awaited" not in err
    assert child.returncode != 0


async def test_gather_trajectories_in_order_with_exceptions_in_place() -> None:
    work = [rollout(2, delay_s=0.01), rollout(1, fail=True), rollout(0)]
    first, second, third = await gather_trajectories(work, pbar_desc=None, max_exceptions=1)
    assert (first.reward, third.reward) == (2, 0)
    assert isinstance(second, ValueError)
    with pytest.raises(ValueError, match="rollout 1"):
        await gather_trajectories([rollout(9_000), rollout(1, fail=True)], pbar_desc=None)


async def test_the_self_play_pattern() -> None:
    """Rollouts that give a tuple each, gathered by position with the context objects."""

    async def game(number: int) -> tuple[Trajectory, Trajectory]:
        if number == 1:
            raise ValueError("lost connection")
        return Trajectory(reward=number), Trajectory(reward=-number)

    context = GatherContext(pbar=None, max_exceptions=1)
    with set_gather_context(context):
        future = asyncio.gather(*[wrap_group_awaitable(game(i)) for i in range(3)])
        context.pbar = progress_bar(None, 3)
        results = await future
    assert [result and [t.reward for t in result] for result in results] == [[0, 0], None, [2, -2]]
    assert context.metric_divisors["reward"] == 4


async def test_bar_shows_running_means() -> None:
    class Bar:
        total = 3
        shown: dict[str, float] = {}
        n = 0

        def set_postfix(self, means: dict[str, float], refresh: bool) -> None:
            self.shown = means

        def update(self, n: int) -> None:
            self.n += n

    context = GatherContext(pbar=Bar(), max_exceptions=1, max_metrics=1)
    context.rollout_finished(Trajectory(reward=1, metrics={"win": True, "turns": 3}))
    context.rollout_finished(Trajectory(reward=0, metrics={"win": False, "turns": 4}))
    context.rollout_failed(ValueError("x"))
    assert context.pbar.shown == {"reward": 0.5, "win": 0.5, "exceptions": 1}
    assert context.pbar.n == 3
    context.max_metrics = None
    context.rollout_finished(Trajectory(reward=1, metrics={"win": True, "invalid_guess": 1}))
    assert context.pbar.shown["invalid_guess"] == "1 (1 of 3)", "a mean of 1 would look as if all were invalid"


async def test_deprecated_option_warns() -> None:
    with pytest.warns(DeprecationWarning, match="pbar_total_completion_tokens"):
        await gather([[1]], pbar_total_completion_tokens=True)


# --- batches ---


async def batches(rewards: list[list[float | None]], **options: Any) -> list[list[list[float]]]:
    found = trajectory_group_batches(groups_of(rewards), pbar_desc=None, **options)
    return [rewards_of(batch) async for batch in found]


async def test_batches_come_as_groups_finish() -> None:
    others_are_through = asyncio.Event()

    async def slow() -> Trajectory:
        await others_are_through.wait()
        return Trajectory(reward=20)

    groups = [TrajectoryGroup([slow()]), *groups_of([[1], [2], [3], [4]])]
    found = []
    async for batch in trajectory_group_batches(groups, batch_size=2, max_concurrent_batches=2, pbar_desc=None):
        found.append(rewards_of(batch))
        if len(found) == 2:
            others_are_through.set()
    assert [len(batch) for batch in found] == [2, 2, 1]
    assert sorted(found[0] + found[1]) == [[1], [2], [3], [4]]
    assert found[2] == [[20]]


async def test_budget_holds_for_every_batch() -> None:
    rewards: list[list[float | None]] = [[i, None] for i in range(1, 7)]
    found = await batches(rewards, batch_size=2, max_concurrent_batches=1, max_batch_exceptions=2)
    assert [sum(len(group) for group in batch) for batch in found] == [2, 2, 2]
    assert len(await batches(rewards, batch_size=2, max_concurrent_batches=1, max_batch_exceptions=0.5)) == 3
    for too_few in (1, 0.4):
        with pytest.raises(ValueError, match="rollout"):
            await batches(rewards, batch_size=2, max_concurrent_batches=1, max_batch_exceptions=too_few)


async def test_batches_are_skipped_without_running_them() -> None:
    ran: list[int] = []

    async def one(number: int) -> Trajectory:
        ran.append(number)
        return Trajectory(reward=number)

    groups = [TrajectoryGroup([one(i)]) for i in range(5)]
    found = [batch async for batch in trajectory_group_batches(groups, batch_size=2, skip_batches=2, pbar_desc=None)]
    assert rewards_of(found[0]) == [[4]]
    assert ran == [4]


async def test_leaving_early_stops_everything() -> None:
    groups = [TrajectoryGroup([rollout(i, delay_s=0.001 if i == 0 else 60)]) for i in range(9)]
    stream = trajectory_group_batches(groups, batch_size=1, max_concurrent_batches=2, pbar_desc=None)
    async for batch in stream:
        assert rewards_of(batch) == [[0]]
        break
    await stream.aclose()


async def test_the_caller_does_not_run_in_the_context_of_the_batches() -> None:
    async for _ in trajectory_group_batches(groups_of([[1]]), batch_size=1, max_batch_exceptions=9, pbar_desc=None):
        assert get_gather_context().max_exceptions == 0


# --- wrong arguments and results ---


async def return_(value: Any) -> Any:
    return value


async def rewarded(reward: Any, **metrics: Any) -> Trajectory:
    trajectory = Trajectory()
    trajectory.reward = reward
    trajectory.metrics.update(metrics)
    return trajectory


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda: None, "`groups` is None, not a list of TrajectoryGroup: each item of the list is the group"),
        (lambda: TrajectoryGroup([rollout(1), rollout(2)]), "`groups` is a group that was not awaited, not a list"),
        (lambda: TrajectoryGroup([Trajectory()]), "`groups` is a TrajectoryGroup, not a list"),
        (lambda: [Trajectory()], r"`groups\[0\]` is a Trajectory, not a TrajectoryGroup"),
        (lambda: [groups_of([[1]]), rollout(1)], r"`groups\[0\]` is a generator, not a TrajectoryGroup"),
        (lambda: [[rollout(1), rollout(2)]], r"`groups\[0\]` is a list, not a TrajectoryGroup"),
        (
            lambda: [rollout(1), rollout(2)],
            r"gave a Trajectory, not a TrajectoryGroup: put the rollouts of one scenario",
        ),
        (lambda: [return_([Trajectory()])], r"gave a list, not a TrajectoryGroup"),
        (lambda: [TrajectoryGroup([return_(None)])], r"a rollout of a group returned None; it must return"),
        (lambda: [TrajectoryGroup([return_("won")])], r"a rollout of a group returned a str; it must return"),
    ],
)
async def test_what_cannot_be_gathered_as_groups_is_named(groups: Any, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        await gather_trajectory_groups(groups(), pbar_desc=None)
    gc.collect()


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        (lambda: rollout(1), "`trajectories` is a coroutine that was not awaited, not a list of rollout"),
        (lambda: [Trajectory()], r"`trajectories\[0\]` is a Trajectory, not a rollout"),
        (lambda: [rollout, rollout], r"`trajectories\[0\]` is a function, not a rollout: pass calls of your rollout"),
        (lambda: [return_(None)], r"a rollout returned None; it must return an art\.Trajectory"),
        (lambda: [return_("won")], r"a rollout returned a str: 'won'; it must"),
    ],
)
async def test_what_cannot_be_gathered_as_trajectories_is_named(rollouts: Any, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        await gather_trajectories(rollouts(), pbar_desc=None)
    gc.collect()


async def test_after_each_must_give_groups() -> None:
    async def after_each(group: TrajectoryGroup) -> Any:
        return True

    with pytest.raises(TrajectoryError, match="`after_each` returned a bool: True; return the group to keep"):
        await gather([[1]], after_each=after_each)


async def test_a_metric_that_is_no_number_does_not_end_a_gather() -> None:
    (trajectory,) = await gather_trajectories([rewarded(1.0, answer="blue", n=2)], pbar_desc=None)
    assert trajectory.metrics == {"answer": "blue", "n": 2}
