"""What fails outside of the policy is never a reward: rollouts, judges and tools that break, a few times or for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import art
from art.errors import (
    BudgetError,
    ConfigError,
    DiskFullError,
    FaultRateError,
    JudgeError,
    RolloutError,
    ToolServerError,
    TrainingError,
)
from art.rewards import GroupScorer, Judgement, JudgeSettings, Ruler, Verdict, judge_client
from art.storage.jsonl import read_lines
from art.task import Scenario, Split, Task, TaskDefaults
from art.testing.judge import ScriptedJudge
from art.trajectory import PydanticException, Trajectory, TrajectoryGroup
from art_recipes.training.training_loop import StepReport, evaluate, train_task
from tests.support.fake_art_server import FakeArtServer
from tests.support.model_folder import paths_of

HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "1"}


def done(reward: float = 1.0, **fields: Any) -> Trajectory:
    return Trajectory(messages_and_choices=[HELLO, ANSWER], reward=reward, **fields)


def too_many_requests() -> openai.RateLimitError:
    request = httpx2.Request("POST", "http://api.test")
    return openai.RateLimitError("slow down", response=httpx2.Response(429, request=request), body=None)


async def rollout(reward: float | Exception, *, wait_s: float = 0.0) -> Trajectory:
    await asyncio.sleep(wait_s)
    if isinstance(reward, Exception):
        raise reward
    return done(reward)


async def gather(*groups: list[float | Exception], **options: Any) -> list[TrajectoryGroup]:
    pending = [TrajectoryGroup([rollout(reward) for reward in rewards]) for rewards in groups]
    return await art.gather_trajectory_groups(pending, pbar_desc=None, **options)


def rewards(groups: list[TrajectoryGroup]) -> list[list[float]]:
    return [[trajectory.reward for trajectory in group] for group in groups]


# --- in a gather ---


async def test_faults_are_counted_by_kind_and_never_scored() -> None:
    faults = art.FaultWatch()
    down = ToolServerError("gone")
    groups = await gather([1, down, 0], [down, too_many_requests()], [KeyError("a"), 2], faults=faults)
    assert rewards(groups) == [[1, 0], [2]]
    assert [len(group.exceptions) for group in groups] == [1, 1]
    assert faults.metrics() == {
        "data/infra_fault_rate": 4 / 7, "data/infra_faults/tool_server": 2, "data/infra_faults/rate_limit": 1,
        "data/infra_faults/KeyError": 1,
    }  # fmt: skip
    assert faults.metrics() == {}, "each step has its own"
    assert faults.num_faults == 4


async def test_a_storm_of_429_passes_or_ends_the_run() -> None:
    faults = art.FaultWatch(max_rate=0.5, window=8)
    assert await gather([too_many_requests()] * 4, faults=faults) == [], "the window is not full yet"
    assert rewards(await gather([1.0] * 8, faults=faults)) == [[1.0] * 8]
    with pytest.raises(FaultRateError, match=r"5 of the last 8 rollouts.*rate_limit 9.*slow down"):
        await gather([too_many_requests()] * 8, faults=faults)


async def test_a_full_disk_of_the_server_ends_the_run() -> None:
    """Otherwise a group would be trained without the rollouts that failed meanwhile."""
    request = httpx2.Request("POST", "http://server/v1/chat/completions")
    body = {"error": {"message": "no space left on the disk of /data/art.db", "code": "disk_full"}}
    full = openai.InternalServerError("507", response=httpx2.Response(507, request=request), body=body["error"])
    with pytest.raises(DiskFullError, match=r"the run stops, because a rollout could not be recorded.*Free space"):
        await gather([1, full, 0], [2.0], faults=art.FaultWatch())
    with pytest.raises(DiskFullError):
        await art.gather_trajectories([rollout(1), rollout(full)], pbar_desc=None, max_exceptions=1)


async def test_a_rollout_that_is_late() -> None:
    faults = art.FaultWatch()
    pending = [TrajectoryGroup([rollout(1), rollout(2, wait_s=60)]), TrajectoryGroup([rollout(3)])]
    groups = await art.gather_trajectory_groups(pending, pbar_desc=None, faults=faults, rollout_timeout_s=0.05)
    assert rewards(groups) == [[1], [3]]
    assert groups[0].exceptions[0].message == "a rollout took longer than 0.05 s"
    assert faults.metrics()["data/infra_faults/timeout"] == 1
    first, second = await art.gather_trajectories(
        [rollout(1), rollout(2, wait_s=60)], pbar_desc=None, max_exceptions=1, rollout_timeout_s=0.05
    )
    assert (first.reward, type(second)) == (1, TimeoutError)


async def test_a_time_limit_leaves_no_coroutine_behind(recwarn: pytest.WarningsRecorder) -> None:
    pending = TrajectoryGroup([rollout(KeyError("first")), rollout(1, wait_s=60)])
    work = asyncio.ensure_future(art.gather_trajectory_groups([pending], pbar_desc=None, rollout_timeout_s=60))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


async def test_what_says_of_itself_that_it_failed() -> None:
    async def says_so() -> Trajectory:
        return done(0.0, metadata={"outcome": "infra_fault", "error": "the shop is closed"})

    faults = art.FaultWatch()
    pending = TrajectoryGroup([says_so(), rollout(1)])
    (group,) = await art.gather_trajectory_groups([pending], pbar_desc=None, faults=faults)
    assert rewards([group]) == [[1]]
    assert group.exceptions[0].message == "the shop is closed"
    assert faults.metrics() == {"data/infra_fault_rate": 0.5, "data/infra_faults/RolloutError": 1}
    (error,) = await art.gather_trajectories([says_so()], pbar_desc=None, max_exceptions=1)
    assert isinstance(error, RolloutError)
    dumped = done(0.0, metadata={"outcome": "infra_fault"}, logs=["the tool is gone"]).model_dump(mode="json")
    assert TrajectoryGroup([dumped]).exceptions[0].message == "the tool is gone"


async def test_faults_of_the_policy_are_scored_and_counted() -> None:
    async def spoilt() -> Trajectory:
        return done(-1.0, metadata={"outcome": "policy_fault"})

    faults = art.FaultWatch()
    groups = await art.gather_trajectory_groups(
        [TrajectoryGroup([spoilt(), rollout(1)])], pbar_desc=None, faults=faults
    )
    assert rewards(groups) == [[-1, 1]]
    assert faults.metrics() == {"data/infra_fault_rate": 0.0, "data/policy_fault_rate": 0.5}


@pytest.mark.parametrize("error", [ValueError("a bug"), JudgeError("no judge"), ToolServerError("gone")])
async def test_a_reward_that_fails_costs_its_group_and_no_other(error: Exception, caplog: Any) -> None:
    async def after_each(group: TrajectoryGroup) -> TrajectoryGroup:
        if len(group) == 2:
            raise error
        return group

    caplog.set_level(logging.WARNING)
    faults = art.FaultWatch()
    assert rewards(await gather([1, 2], [3], after_each=after_each, faults=faults)) == [[3]]
    assert faults.metrics()["data/infra_fault_rate"] == pytest.approx(2 / 3)
    assert "scoring it failed" in caplog.text
    small = art.FaultWatch(max_rate=0.5, window=3)
    with pytest.raises(FaultRateError, match="2 of the last 3"):
        await gather([1, 2], [3], [4, 5], after_each=after_each, faults=small)
    if isinstance(error, ValueError):
        return
    assert rewards(await gather([1, 2], [3], after_each=after_each, max_exceptions=1)) == [[3]]
    with pytest.raises(type(error)):
        await gather([1, 2], [3], after_each=after_each)


@pytest.mark.parametrize("error", [BudgetError("spent"), ConfigError("no SDK")])
async def test_what_no_later_rollout_would_mend_ends_it_at_once(error: Exception) -> None:
    with pytest.raises(type(error)):
        await gather([1, error], faults=art.FaultWatch())
    with pytest.raises(type(error)):
        await gather([1, error], max_exceptions=99)


async def test_batches_keep_the_contract() -> None:
    faults = art.FaultWatch()
    pending = [TrajectoryGroup([rollout(reward) for reward in (1, KeyError("a"))]) for _ in range(2)]
    batches = [batch async for batch in art.trajectory_group_batches(pending, batch_size=2, pbar_desc=None,
                                                                     faults=faults)]  # fmt: skip
    assert rewards(batches[0]) == [[1], [1]]
    assert faults.metrics()["data/infra_fault_rate"] == 0.5


async def buggy(scenario: dict[str, Any]) -> Trajectory:
    await asyncio.sleep(0)
    return done(scenario["solution"])


async def test_the_first_failure_of_a_kind_has_its_traceback_and_the_others_are_counted(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    faults = art.FaultWatch(max_rate=1.0)
    pending = [TrajectoryGroup([buggy({}), rollout(KeyError("elsewhere"))]) for _ in range(21)]
    await art.gather_trajectory_groups(pending, pbar_desc=None, faults=faults)
    first, second, *counts = [text for text in caplog.messages if "dropped a group" not in text]
    assert 'in buggy\n    return done(scenario["solution"])' in first
    assert first.endswith("KeyError: 'solution'")
    assert "in rollout\n    raise reward" in second, "another place"
    assert "asyncio/" not in first, "only lines of the user's program"
    numbers = sorted((int(text.split()[0]), "test_failures.py" in text) for text in counts)
    assert numbers == [(10, True), (10, True)]


async def test_a_forgotten_await_is_named(caplog: Any) -> None:
    async def forgetful() -> Trajectory:
        answer: Any = rollout(1)
        try:
            return done(answer.reward)
        finally:
            answer.close()

    await art.gather_trajectories([forgetful()], pbar_desc=None, faults=art.FaultWatch())
    assert caplog.text.rstrip().endswith("(was `await` forgotten?)")


async def test_an_error_that_ends_a_gather_names_the_setting(caplog: Any) -> None:
    for options in ({}, {"max_exceptions": 1}):
        with pytest.raises(KeyError) as caught:
            await gather([1, KeyError("a"), KeyError("b")], **options)
        (note,) = caught.value.__notes__
        assert "max_exceptions=" in note
        assert "faults=art.FaultWatch()" in note


async def test_a_gather_says_how_many_rollouts_it_waits_for(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art.gather.REPORT_AFTER_S", 0.02)

    async def until_reported() -> Trajectory:
        while "still waiting for 1 rollouts" not in caplog.text:
            await asyncio.sleep(0.01)
        return done()

    pending = [TrajectoryGroup([rollout(1), until_reported(), rollout(2)]), TrajectoryGroup([rollout(0), rollout(1)])]
    assert len(await art.gather_trajectory_groups(pending, pbar_desc=None)) == 2


def test_rollouts_that_ran_elsewhere() -> None:
    failed = PydanticException(type="infra_fault", message="the tool is down", traceback="")
    faults = art.FaultWatch(max_rate=0.5, window=4)
    faults.count_groups([TrajectoryGroup([done()], exceptions=[failed])])
    assert faults.metrics() == {"data/infra_fault_rate": 0.5, "data/infra_faults/infra_fault": 1}
    with pytest.raises(FaultRateError, match="infra_fault: the tool is down"):
        faults.count_groups([TrajectoryGroup([], exceptions=[failed] * 3)])


# --- in a training ---


class Flaky(Task):
    name = "flaky"
    description = "says whatever the test wants"
    headline_metric = "reward"

    def __init__(self, act: Callable[[int, int], float | Exception]) -> None:
        self.act, self.step = act, -1
        """Gives the reward of rollout i in step n."""

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        self.step += 1
        return [self.scenario(split, seed, i, {"step": self.step}) for i in range(count)]

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        trajectory = await rollout(self.act(scenario.inputs["step"], rollout_index))
        trajectory.messages_and_choices[1] = {"role": "assistant", "content": f"worth {trajectory.reward}"}
        return trajectory


@pytest.fixture
def server() -> FakeArtServer:
    return FakeArtServer()


@pytest.fixture
async def model(server: FakeArtServer, tmp_path: Path) -> art.TrainableModel:
    backend = art.Backend()
    backend._client = server.client()
    model = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))
    await model.register(backend)
    return model


async def train(model: art.TrainableModel, act: Any, *, steps: int = 3, **options: Any) -> list[StepReport]:
    defaults = TaskDefaults(learning_rate=1e-3, num_steps=steps, groups_per_step=2, rollouts_per_group=4)
    on_step = options.pop("on_step", lambda report: None)
    return await train_task(model, Flaky(act), defaults, num_steps=steps, seed=0, on_step=on_step, **options)


def trained_rewards(server: FakeArtServer) -> list[list[list[float]]]:
    """By step and group."""
    bodies = [body for _, path, body in server.requests if path.endswith("/train")]
    return [[[t["reward"] for t in group["trajectories"]] for group in body["groups"]] for body in bodies]


async def test_a_group_with_one_survivor(model: art.TrainableModel, server: FakeArtServer) -> None:
    def act(step: int, index: int) -> float | Exception:
        return 0.5 if index == 0 or step else KeyError("lost")

    reports = await train(model, act, steps=2)
    assert trained_rewards(server) == [[[0.5], [0.5]], [[0.5] * 4, [0.5] * 4]]
    assert "faults 75%" in reports[0].line("reward")
    assert "faults" not in reports[1].line("reward")
    rows = [row for _, row in read_lines(paths_of(model).history) if row]
    assert [row["data/infra_fault_rate"] for row in rows] == [0.75, 0.0]
    assert rows[0]["data/infra_faults/KeyError"] == 6


async def test_groups_without_any_rollout_are_replaced(model: art.TrainableModel, server: FakeArtServer) -> None:
    def act(step: int, index: int) -> float | Exception:
        return too_many_requests() if step == 0 else float(index)

    (report,) = await train(model, act, steps=1)
    assert "faults 50%" in report.line("reward")
    assert trained_rewards(server) == [[[0.0, 1.0, 2.0, 3.0]] * 2]
    rows = [row for _, row in read_lines(paths_of(model).history) if row]
    assert [(row["step"], row["data/infra_fault_rate"], row["pipeline/groups_lost"]) for row in rows] == [(1, 0.5, 2)]


async def test_steps_with_nothing_to_learn_are_logged_and_too_many_of_them_end_it(
    model: art.TrainableModel, server: FakeArtServer
) -> None:
    server.nothing_to_learn = True
    reports: list[StepReport] = []
    with pytest.raises(TrainingError, match="5 steps in a row had no group with differing rewards"):
        await train(model, lambda step, index: 1.0, steps=2, on_step=reports.append)
    assert [(report.step, report.trained) for report in reports] == [(0, False)] * 5, "as their rows in the history"
    assert "(no reward spread: not trained, the model stays at checkpoint 0)" in reports[0].line("reward")
    rows = [row for _, row in read_lines(paths_of(model).history) if row]
    assert [(row["step"], row["data/step_num_groups_trainable"]) for row in rows] == [(0, 0)] * 5
    assert await model.get_step() == 0


async def test_groups_that_are_all_bad_end_it_with_their_reason(
    model: art.TrainableModel, server: FakeArtServer
) -> None:
    with pytest.raises(FaultRateError, match=r"64 of the last 64 rollouts failed.*tool_server 64.*the shop is down"):
        await train(model, lambda step, index: ToolServerError("the shop is down"), steps=100)
    assert trained_rewards(server) == []


async def test_a_judge_that_is_down(
    model: art.TrainableModel, server: FakeArtServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_client, "_has_litellm", lambda: False)  # importing it takes seconds
    settings = JudgeSettings(max_attempts=2, first_wait_s=0.001, budget=model.costs,
                             prompt_usd_per_million=1.0, completion_usd_per_million=1.0)  # fmt: skip
    with ScriptedJudge(lambda trajectory: 0.9, faults=["500"] * 8) as judge:
        outside = {"base_url": judge.base_url, "api_key": "none"}
        scorer = GroupScorer(Ruler("openai/judge", extra_litellm_params=outside, settings=settings), window=6)
        reports = await train(model, lambda step, index: float(index), steps=3, score=scorer)
    assert [report.trained for report in reports] == [True, True, True]
    assert "unjudged 67%" in reports[0].line("reward")
    assert trained_rewards(server) == [[[0.9] * 4] * 2] * 3, "and never those of the task, or 0"
    assert reports[2].metrics["data/judge_fault_rate"] == 0
    assert model.costs.totals()["train/judge/ruler"].priced == 6
    with ScriptedJudge(lambda trajectory: 0.9, always="429") as judge:
        outside = {"base_url": judge.base_url, "api_key": "none"}
        scorer = GroupScorer(Ruler("openai/judge", extra_litellm_params=outside, settings=settings), window=6)
        with pytest.raises(FaultRateError, match=r"6 of the last 6 groups.*judge"):
            await train(model, lambda step, index: float(index), steps=9, score=scorer)


async def test_a_budget_that_is_spent_in_the_middle_of_a_step(model: art.TrainableModel, server: FakeArtServer) -> None:
    class Dear:
        name = "dear"

        async def judge(self, group: TrajectoryGroup) -> Any:
            model.costs.check()
            model.costs.book("judge/dear", usd=0.4)
            return await GroupJudge().judge(group)

    model.budget_usd = 1.0
    with pytest.raises(BudgetError, match=r"1\.2000 USD are spent: train/judge/dear 1\.2000"):
        await train(model, lambda step, index: float(index), steps=9, score=GroupScorer(Dear()))
    assert [len(groups) for groups in trained_rewards(server)] == [2, 1], "what was paid for is trained on"
    rows = [row for _, row in read_lines(paths_of(model).history) if row]
    first, last = (row["costs/cum/all"] for row in rows)
    assert last == pytest.approx(1.2)
    assert round(first, 6) in (0.8, 1.2)  # the third group may be judged before the first step's row is written
    with pytest.raises(BudgetError):
        await train(model, lambda step, index: float(index), steps=9, score=GroupScorer(Dear()))
    assert len(trained_rewards(server)) == 2


class GroupJudge:
    name = "mean"

    async def judge(self, group: TrajectoryGroup) -> Any:
        return Judgement(verdicts=[Verdict(score=trajectory.reward) for trajectory in group])


async def test_an_evaluation_with_failures(model: art.TrainableModel) -> None:
    task = Flaky(lambda step, index: float(step))
    found = await evaluate(model, task, count=4, seed=0)
    assert found.mean == 0.0
    lucky = iter([KeyError("a"), 1.0, 0.0, 1.0])
    found = await evaluate(model, Flaky(lambda step, index: next(lucky)), count=4, seed=0)
    assert (found.mean, len(found.trajectories)) == (pytest.approx(2 / 3), 3)
    with pytest.raises(FaultRateError, match="4 of the last 4"):
        await evaluate(model, Flaky(lambda step, index: KeyError("a")), count=4, seed=0)


async def test_what_turns_out_later_to_be_no_rollout_is_not_trained(
    model: art.TrainableModel, server: FakeArtServer
) -> None:
    group = TrajectoryGroup([done(0.0), done(1.0), done(0.5)])
    group.trajectories[0].metadata["outcome"] = "infra_fault"
    await model.train([group])
    assert trained_rewards(server) == [[[1.0, 0.5]]]
