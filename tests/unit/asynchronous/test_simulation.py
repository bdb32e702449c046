"""Simulated runs: by hand where that is possible, by their laws, and against a trial of another implementation."""

from __future__ import annotations

import random
import statistics
from collections import Counter

import pytest

from art.asynchronous.pace import Pace
from benchmarks.pipelines import simulation as module
from benchmarks.pipelines.simulation import (
    Clock,
    Machine,
    Schedule,
    Simulated,
    Turn,
    Workload,
    WorkQueue,
    simulate,
)  # fmt: skip
from benchmarks.pipelines.tasks import LogNormal

TOOL = LogNormal(median_s=0.2, p99_s=5.0)


def long_tails(seed: int) -> Workload:
    """Rollouts of 6 turns, each with a tool of log-normal latency."""

    def workload(number: int, index: int) -> list[Turn]:
        rng = random.Random(f"{seed}/{number}/{index}")
        return [Turn(engine_s=0.03, tool_s=TOOL.draw(rng)) for _ in range(6)]

    return workload


def run(workload: Workload, staleness: int, *, steps: int = 10, train_s: float = 2.0, **machine: object) -> Simulated:
    schedule = Schedule(steps=steps, groups_per_step=8, rollouts_per_group=8, max_staleness=staleness)
    return simulate(workload, Machine(train_s=train_s, **machine), schedule)  # type: ignore[arg-type]


def test_the_distribution_has_its_quantiles() -> None:
    rng = random.Random(0)
    drawn = sorted(TOOL.draw(rng) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(0.2, rel=0.05)
    assert drawn[19_800] == pytest.approx(5.0, rel=0.15)
    assert sum(drawn) / len(drawn) == pytest.approx(TOOL.mean_s, rel=0.05)


def test_without_staleness_a_run_is_the_plain_loop() -> None:
    workload = long_tails(0)
    slowest = [
        max(sum(turn.engine_s + turn.tool_s for turn in workload(8 * step + group, i)) for group in range(8) for i in range(8))
        for step in range(10)
    ]  # fmt: skip
    result = run(workload, 0)
    assert result.wall_s == pytest.approx(sum(slowest) + 10 * 2.0)
    assert result.trainer_idle_share == pytest.approx(1 - 20 / result.wall_s)
    assert result.staleness == {0: 80}


def test_equal_rollouts_overlap_with_training() -> None:
    """Rollouts of 3 s and steps of 2 s: 5 s a step in turn; overlapped, the longer one counts."""
    result = run(lambda number, index: [Turn(engine_s=1.0, tool_s=2.0)], 1, steps=20)
    assert result.wall_s < 20 * 3.3
    assert run(lambda number, index: [Turn(engine_s=1.0, tool_s=2.0)], 0, steps=20).wall_s == pytest.approx(100)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_a_run_trains_the_first_groups_once_within_the_bound(staleness: int) -> None:
    result = run(long_tails(1), staleness)
    assert sorted(number for step in result.steps for number in step.groups) == list(range(80))
    assert max(result.staleness) <= staleness
    assert [step.step for step in result.steps] == list(range(10))
    versions = {rollout.group: rollout.policy_version for rollout in result.rollouts}
    assert Counter(step.step - versions[number] for step in result.steps for number in step.groups) == result.staleness


def test_more_staleness_is_never_slower_on_a_machine_without_limits() -> None:
    walls = [run(long_tails(2), staleness).wall_s for staleness in (0, 1, 2, 4)]
    assert walls == sorted(walls, reverse=True)


def test_seats_workers_and_alternation_cost_time() -> None:
    workload = long_tails(4)
    free = run(workload, 2).wall_s
    assert run(workload, 2, seats=1).wall_s > 1.05 * free
    assert run(workload, 2, alternates=True, train_s=5.0).wall_s > run(workload, 2, train_s=5.0).wall_s
    cpu = lambda number, index: [Turn(engine_s=0.01, worker_s=0.5)]  # noqa: E731
    assert run(cpu, 0, tool_workers=2, steps=2).wall_s == pytest.approx(2 * (0.01 + 32 * 0.5 + 2.0))


def test_the_trial_is_reproduced_by_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier trial with these latencies was 2.1 to 2.9 times faster at staleness 1, 2.7 to 4.7 at 2 and little more
    at 4. It only counted groups and took the first that had finished. That breaks the bound, which ART keeps."""

    class Counting(Pace):
        def _is_feasible(self, due: Counter[int], step: int, until: int | None = None) -> bool:
            return True

    def speedups() -> list[float]:
        """Mean over three seeds for staleness 1, 2 and 4."""
        runs = [[run(long_tails(seed), s, steps=20, train_s=5.0) for s in (0, 1, 2, 4)] for seed in range(3)]
        assert (max(max(of_seed[1].staleness) for of_seed in runs) == 1) == (module.Pace is Pace)
        return [statistics.fmean(of_seed[0].wall_s / of_seed[i].wall_s for of_seed in runs) for i in (1, 2, 3)]

    kept = speedups()
    monkeypatch.setattr(module, "Pace", Counting)
    counted = speedups()
    assert 2.1 < counted[0] < 2.9
    assert 2.7 < counted[1] < 4.7
    assert counted[1] < counted[2] < 1.25 * counted[1]
    assert 1.5 < kept[0] < 2 < kept[1] < 3 < kept[2] < 5  # at most S + 1 where the slowest rollouts decide


# -- the clock and the queues, against times computed by hand --


def ends_of(clock: Clock, queue: WorkQueue, *pieces: tuple[float, float]) -> list[float]:
    """When pieces of work end that are added at a time: pairs of that time and their seconds alone."""
    ends = [0.0] * len(pieces)

    def add(place: int, seconds: float) -> None:
        queue.add(seconds, lambda: ends.__setitem__(place, clock.now))

    for place, (at, seconds) in enumerate(pieces):
        clock.after(at, lambda place=place, seconds=seconds: add(place, seconds))  # type: ignore[misc]
    clock.run()
    return ends


def test_actions_are_called_in_the_order_of_their_times() -> None:
    clock, calls = Clock(), []
    for seconds, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.after(seconds, lambda name=name: calls.append((name, clock.now)))  # type: ignore[misc]
    clock.run()
    assert calls == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


def test_work_without_limits_takes_its_own_time() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    assert ends_of(clock, queue, (0.0, 3.0), (1.0, 1.0), (9.0, 2.0)) == [3.0, 2.0, 11.0]
    assert queue.busy_s == pytest.approx(3.0 + 2.0)


def test_work_waits_for_a_seat_in_its_order() -> None:
    clock = Clock()
    assert ends_of(clock, WorkQueue(clock, seats=2), (0, 4.0), (0, 1.0), (0, 2.0), (0, 1.0)) == [4.0, 1.0, 3.0, 4.0]


def test_a_full_slowdown_shares_one_processor() -> None:
    """Two pieces of 1 and 3 s at half speed: the first ends at 2 s, the second has 2 s left, alone."""
    clock = Clock()
    assert ends_of(clock, WorkQueue(clock, slowdown=1.0), (0, 1.0), (0, 3.0)) == pytest.approx([2.0, 4.0])


def test_a_later_piece_slows_down_a_running_one() -> None:
    """At 1 s half of the first is left. Both take 1.5 times as long until the second ends at 2.5 s; 0 is left then."""
    clock = Clock()
    assert ends_of(clock, WorkQueue(clock, slowdown=0.5), (0, 2.0), (1, 1.0)) == pytest.approx([2.5, 2.5])


def test_a_pause_delays_and_is_not_busy() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    clock.after(1.0, queue.pause)
    clock.after(5.0, queue.resume)
    assert ends_of(clock, queue, (0, 2.0), (2.0, 1.0)) == pytest.approx([6.0, 6.0])
    assert queue.busy_s == pytest.approx(2.0)
