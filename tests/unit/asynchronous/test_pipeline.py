"""`art.pipeline` with a backend without server: what it trains, how it ends, and what it says about rollouts that hang."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest

import art
from art.asynchronous.pipeline import Pipeline
from art.asynchronous.step import PipelineStep
from art.client.rollout_context import current_rollout
from art.errors import BudgetError, ConfigError, FaultRateError, TrainingError, TrajectoryError
from tests.support.scripted_backend import ScriptedBackend, run_skipping

SCENARIOS = [f"s{index}" for index in range(6)]


class Agent:
    """A rollout function that notes what it was asked to do."""

    def __init__(self, seconds: Any = lambda *place: 0.0) -> None:
        self.seconds = seconds
        self.calls: list[tuple[Any, int]] = []
        self.versions: list[tuple[str, int | None]] = []
        self.num_running = self.most_running = 0

    async def __call__(self, model: art.TrainableModel, scenario: Any, rollout_index: int, seed: int) -> art.Trajectory:
        self.calls.append((scenario, rollout_index))
        self.versions.append((model.get_inference_name(), current_rollout.get().step))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.seconds(scenario, rollout_index))
        finally:
            self.num_running -= 1
        return art.Trajectory(reward=float(rollout_index), metadata={"scenario_id": str(scenario), "seed": str(seed)})


def make(backend: ScriptedBackend, rollout: Any, scenarios: Any = SCENARIOS, **settings: Any) -> Pipeline:
    inputs = {name: settings.pop(name) for name in ("after_each", "evaluate") if name in settings}
    sizes = {"rollouts_per_group": 2, "groups_per_step": 2, "max_concurrent": None, "shuffle": False}
    return art.pipeline(backend.model(), scenarios=scenarios, rollout=rollout, **inputs, **sizes | settings)


async def collect(pipeline: Pipeline, steps: int, into: list[PipelineStep] | None = None) -> list[PipelineStep]:
    ended = [] if into is None else into
    async for step in pipeline.train(steps):
        ended.append(step)
    return ended


def trained_scenarios(backend: ScriptedBackend) -> list[list[str]]:
    return [[f"s{group.metadata['scenario_id']}" for group in call.groups] for call in backend.calls]


def all_trained(backend: ScriptedBackend) -> list[str]:
    return sorted(itertools.chain.from_iterable(trained_scenarios(backend)))


async def test_without_staleness_each_step_has_the_next_scenarios_in_order(tmp_path: Path) -> None:
    rng = random.Random(0)
    agent = Agent(lambda *place: rng.random() * 0.01)
    backend = ScriptedBackend(tmp_path)
    steps = await collect(make(backend, agent, max_staleness=0), 4)
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert trained_scenarios(backend) == [["s0", "s1"], ["s2", "s3"], ["s4", "s5"], ["s0", "s1"]]
    assert [[t.reward for t in group] for group in backend.calls[0].groups] == [[0.0, 1.0], [0.0, 1.0]]
    assert all(step.staleness_max == 0 and step.trained for step in steps)
    assert sorted(agent.calls[:4]) == [("s0", 0), ("s0", 1), ("s1", 0), ("s1", 1)]
    assert agent.versions[-1] == ("shop/agent@3", 3)
    rows = [json.loads(line) for line in (tmp_path / "shop/models/agent/history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["train/reward"] == 0.5
    assert rows[-1]["pipeline/groups_running"] == 0


@pytest.mark.parametrize("max_staleness", [1, 2])
async def test_rollouts_run_ahead_within_the_bound_and_nothing_is_lost(tmp_path: Path, max_staleness: int) -> None:
    rng = random.Random(max_staleness)
    agent = Agent(lambda *place: rng.choice([0.0, 0.01, 0.05]))
    backend = ScriptedBackend(tmp_path, train_s=0.01)
    steps = await collect(make(backend, agent, max_staleness=max_staleness), 8)
    assert max(step.staleness_max for step in steps) <= max_staleness
    assert max(step.staleness_max for step in steps) > 0
    assert all(len(call.groups) == 2 for call in backend.calls)
    expected = sorted([f"s{position % 6}" for position in range(16)])
    assert all_trained(backend) == expected
    assert len(agent.calls) == 32
    assert agent.most_running > 4
    for call, step in zip(backend.calls, steps, strict=True):
        assert call.step == step.number - 1


async def test_limits_and_seeds(tmp_path: Path) -> None:
    seeds = []
    for run in ("a", "b"):
        backend, agent = ScriptedBackend(tmp_path / run), Agent(lambda *place: 0.001)
        await collect(make(backend, agent, max_concurrent=3, max_staleness=2, shuffle=True, seed=5), 3)
        assert agent.most_running == 3
        groups = [group for call in backend.calls for group in call.groups]
        seeds.append({(g.metadata["scenario_id"], i): t.metadata["seed"] for g in groups for i, t in enumerate(g)})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 12


async def test_an_endless_stream_and_a_judge(tmp_path: Path) -> None:
    async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup | None:
        return None if group.metadata["scenario_id"] in ("10", "20") else group

    judge.metrics = lambda: {"data/judge_fault_rate": 0.25}  # type: ignore[attr-defined]
    backend = ScriptedBackend(tmp_path)
    pipeline = make(backend, Agent(), lambda position: {"id": position * 10}, after_each=judge, max_staleness=0)
    steps = await collect(pipeline, 2)
    assert trained_scenarios(backend) == [["s0", "s30"], ["s40", "s50"]]
    assert steps[0].metrics["data/judge_fault_rate"] == 0.25


async def test_faults_of_the_policy_are_those_of_the_rollouts_that_the_step_trains_on(tmp_path: Path) -> None:
    """Rollouts of later steps end while a step waits or trains, and must not count for it."""
    spoilt = {("s1", 0), ("s2", 0), ("s2", 1), ("s3", 0)}

    async def rollout(model: art.TrainableModel, scenario: str, rollout_index: int) -> art.Trajectory:
        outcome = "policy_fault" if (scenario, rollout_index) in spoilt else "ok"
        return art.Trajectory(reward=float(rollout_index), metadata={"scenario_id": scenario, "outcome": outcome})

    backend = ScriptedBackend(tmp_path)
    steps = await collect(make(backend, rollout, max_staleness=2), 3)
    assert [step.metrics.get("data/policy_fault_rate") for step in steps] == [0.25, 0.75, None]


async def test_nothing_to_learn_ends_the_training(tmp_path: Path) -> None:
    async def rollout(model: Any, scenario: str) -> art.Trajectory:
        return art.Trajectory(reward=1.0)

    backend = ScriptedBackend(tmp_path)
    steps: list[PipelineStep] = []
    with pytest.raises(TrainingError, match="5 steps in a row"):
        await collect(make(backend, rollout), 7, steps)
    assert [(step.number, step.trained) for step in steps] == [(0, False)] * 5
    assert "not trained" in steps[0].line()


async def test_a_solved_task_ends_without_an_error(tmp_path: Path) -> None:
    async def rollout(model: Any, scenario: str, rollout_index: int) -> art.Trajectory:
        return art.Trajectory(reward=1.0 if model.get_inference_name().endswith("@1") else float(rollout_index))

    backend = ScriptedBackend(tmp_path)
    steps = await collect(make(backend, rollout, max_staleness=0), 9)
    assert [step.trained for step in steps] == [True, *[False] * 5]


async def test_an_agent_that_fails_at_once_ends_the_training(tmp_path: Path) -> None:
    calls = 0

    async def rollout(model: Any, scenario: str) -> art.Trajectory:
        nonlocal calls
        calls += 1
        raise ConnectionError("no tool")

    with pytest.raises(FaultRateError, match="no tool"):
        await collect(make(ScriptedBackend(tmp_path), rollout), 5)
    assert calls < 80
    with pytest.raises(TrainingError, match="the last 33 groups had nothing to train on"):
        await collect(make(ScriptedBackend(tmp_path / "b"), rollout, max_fault_rate=1.0), 5)


async def test_wrong_results_and_wrong_functions(tmp_path: Path) -> None:
    async def rollout(model: Any, scenario: str) -> Any:
        return scenario

    with pytest.raises(TrajectoryError, match="a rollout returned a str: 's"):
        await collect(make(ScriptedBackend(tmp_path), rollout), 5)
    with pytest.raises(ConfigError, match="cannot be called with a model and a scenario"):
        make(ScriptedBackend(tmp_path), lambda model: None)
    with pytest.raises(ConfigError, match="returned None; make it an `async def`"):
        await collect(make(ScriptedBackend(tmp_path), lambda model, scenario: None), 1)


async def test_leaving_the_loop_keeps_what_has_finished(tmp_path: Path) -> None:
    agent = Agent(lambda scenario, index: 30.0 if scenario == "s3" else 0.0)
    backend = ScriptedBackend(tmp_path)
    pipeline = make(backend, agent, max_staleness=1)
    async for step in pipeline.train(3):
        assert step.number == 1
        while agent.num_running < 2 or len(agent.calls) < 8:
            await asyncio.sleep(0.001)
        break
    agent.seconds = lambda *place: 0.0
    steps = await collect(pipeline, 3)
    assert [step.number for step in steps] == [2, 3]
    assert all_trained(backend) == SCENARIOS
    again = [call for call in agent.calls if agent.calls.count(call) > 1]
    assert sorted(again) == sorted([("s3", 0), ("s3", 1)] * 2)  # only what was interrupted ran again
    assert agent.num_running == 0


async def test_an_error_in_the_training_keeps_the_groups_for_the_next_call(tmp_path: Path) -> None:
    backend, agent = ScriptedBackend(tmp_path), Agent()
    backend.fail = lambda call: TrainingError("out of memory") if call.step == 1 else None
    pipeline = make(backend, agent, max_staleness=0)
    with pytest.raises(TrainingError, match="out of memory"):
        await collect(pipeline, 3)
    backend.fail = lambda call: None
    await collect(pipeline, 3)
    assert trained_scenarios(backend) == [["s0", "s1"], ["s2", "s3"], ["s2", "s3"], ["s4", "s5"]]
    assert len(agent.calls) == 12


async def test_one_training_at_a_time(tmp_path: Path) -> None:
    pipeline = make(ScriptedBackend(tmp_path), Agent())
    steps = pipeline.train(3)
    await anext(steps)
    with pytest.raises(ConfigError, match="trains already"):
        await collect(pipeline, 3)
    await pipeline.close()
    with pytest.raises(ConfigError, match="was closed"):
        await anext(steps)
    assert [step.number for step in await collect(pipeline, 3)] == [2, 3]


async def test_a_spent_budget_ends_the_training_after_what_was_paid_for(tmp_path: Path) -> None:
    backend = ScriptedBackend(tmp_path)
    pipeline = make(backend, Agent(), max_staleness=0, groups_per_step=4)
    model = pipeline.model
    model.budget_usd = 1.0
    num_judged = 0

    async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        nonlocal num_judged
        num_judged += 1
        if num_judged == 3:
            model.costs.book("judge", usd=2.0)
        if num_judged > 3:
            raise BudgetError("spent")
        return group

    pipeline = art.pipeline(model, pipeline.config, scenarios=SCENARIOS, rollout=Agent(), after_each=judge)
    steps: list[PipelineStep] = []
    with pytest.raises(BudgetError):
        await collect(pipeline, 3, steps)
    assert [len(step.groups) for step in steps] == [3]
    model.budget_usd = 10.0
    num_judged = -100
    await collect(pipeline, 2)
    assert all_trained(backend) == sorted([*SCENARIOS, "s0"])


def test_an_agent_that_hangs_is_named_and_cancelled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    hour = 3600.0

    async def play() -> list[PipelineStep]:
        agent = Agent(lambda scenario, index: 10 * hour if (scenario, index) == ("s1", 1) else 2.0)
        backend = ScriptedBackend(tmp_path)
        return await collect(make(backend, agent, max_staleness=1, rollout_timeout_s=600.0), 3)

    steps = run_skipping(play())
    assert [step.number for step in steps] == [1, 2, 3]
    text = r"rollout 1 of scenario 1 \(group 1\) has run for \d+ s, the median takes 2\.0 s"
    assert len(re.findall(f"the next step waits for rollouts: {text}", caplog.text)) in (9, 10)
    slow = max(steps, key=lambda step: step.timing.waited_for_rollouts_s)
    assert [bool(step.findings) for step in steps] == [step is slow for step in steps]
    assert re.fullmatch(f"the step waited for rollouts: {text}", slow.findings[0])
    assert 590 < slow.timing.waited_for_rollouts_s < 610
    assert slow.metrics["data/infra_faults/timeout"] == 1
    assert 0.9 < slow.metrics["pipeline/trainer_idle_share"] <= 1


def test_an_agent_that_returns_after_an_hour_is_trained(tmp_path: Path) -> None:
    async def play() -> list[PipelineStep]:
        agent = Agent(lambda scenario, index: 3600.0 if (scenario, index) == ("s1", 1) else 1.0)
        backend = ScriptedBackend(tmp_path, train_s=1.0)
        steps = await collect(make(backend, agent, max_staleness=2, rollout_timeout_s=None), 6)
        assert all_trained(backend) == sorted([*SCENARIOS, *SCENARIOS])
        return steps

    steps = run_skipping(play())
    assert max(step.staleness_max for step in steps) == 2
    assert 3500 < max(step.timing.waited_for_rollouts_s for step in steps) < 3610
    assert sum(step.timing.held_s for step in steps) > 3000


async def test_settings_that_do_nothing_are_refused(tmp_path: Path) -> None:
    backend = ScriptedBackend(tmp_path)
    with pytest.raises(ConfigError, match="`every` does nothing without `evaluate`"):
        make(backend, Agent(), every=3)
    with pytest.raises(ConfigError, match="given twice"):
        art.pipeline(backend.model(), art.config.PipelineConfig(seed=1), scenarios=SCENARIOS, rollout=Agent(), seed=2)
    with pytest.raises(ConfigError, match="is empty"):
        make(backend, Agent(), [])
    with pytest.raises(ConfigError, match="two scenarios have the id 'a'"):
        make(backend, Agent(), [{"id": "a"}, {"id": "b"}, {"id": "a"}])
    with pytest.raises(ConfigError, match="a list, or a function"):
        make(backend, Agent(), "train.jsonl")
    with pytest.raises(ConfigError, match="`on_nothing` does not apply"):
        await collect_with(make(backend, Agent()), on_nothing="raise")
    with pytest.raises(ConfigError, match="max_staleness=5 needs a loss with a trust region"):
        await collect_with(make(backend, Agent(), max_staleness=5), loss="reinforce")


async def collect_with(pipeline: Pipeline, **settings: Any) -> list[PipelineStep]:
    return [step async for step in pipeline.train(1, **settings)]


async def test_many_rollouts_in_flight_are_paced_exactly(tmp_path: Path) -> None:
    num_running, all_run = 0, asyncio.Event()

    async def rollout(model: Any, position: int, rollout_index: int) -> art.Trajectory:
        nonlocal num_running
        num_running += 1
        if num_running == 2 * 25 * 8:  # the groups of all steps that are still needed
            all_run.set()
        await all_run.wait()
        return art.Trajectory(reward=float(rollout_index))

    backend = ScriptedBackend(tmp_path)
    sizes = {"rollouts_per_group": 8, "groups_per_step": 25, "max_staleness": 4}
    steps = await collect(make(backend, rollout, lambda position: position, **sizes), 2)
    assert [len(step.groups) for step in steps] == [25, 25]
    assert num_running == 400


@pytest.mark.parametrize("in_flight", ["finish", "switch"])
async def test_rollouts_that_go_on_with_new_weights_name_no_checkpoint(tmp_path: Path, in_flight: str) -> None:
    seen = []

    async def rollout(model: Any, scenario: str, rollout_index: int) -> art.Trajectory:
        context = current_rollout.get()
        assert context is not None
        seen.append((model.get_inference_name(), context.switches))
        return art.Trajectory(reward=float(rollout_index))

    backend = ScriptedBackend(tmp_path, steps_at_once=2)
    await collect(make(backend, rollout, in_flight=in_flight, max_staleness=1), 3)
    assert set(seen) == (
        {("shop/agent", True)} if in_flight == "switch" else {("shop/agent@0", False), ("shop/agent@1", False)}
    )
    if in_flight == "finish":
        backend.steps_at_once = 1
        with pytest.raises(
            ConfigError,
            match=r'2 checkpoints of shop/agent at a time.*serves 1.*in_flight="switch", or max_staleness=0',
        ):
            await collect(make(backend, rollout), 4)
