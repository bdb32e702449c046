"""A pipeline that goes on where another one was killed: groups, rollouts, judges' scores, steps and evaluations."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import art
from art.asynchronous.pipeline import Pipeline
from art.errors import ArtError, ConfigError, TrainingError, TrajectoryMismatchError
from tests.support.journals import answer
from tests.support.scripted_backend import ScriptedBackend, TrainCall

SCENARIOS = [{"id": f"s{index}"} for index in range(5)]
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]


class Script:
    """A program that trains, and is killed and started again, against a server that lives on."""

    def __init__(self, folder: Path, *, steps: int = 5, **settings: Any) -> None:
        self.backend = ScriptedBackend(folder, train_s=0.003)
        self.steps, self.settings = steps, settings
        self.finished: Counter[tuple[str, int, int]] = Counter()
        """How often a rollout was run to its end, by scenario, index and seed."""
        self.judged: Counter[str] = Counter()
        self.rng = random.Random(1)

    async def rollout(self, model: Any, scenario: dict[str, str], rollout_index: int, seed: int) -> art.Trajectory:
        await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.004]))
        self.finished[scenario["id"], rollout_index, seed] += 1
        return art.Trajectory(reward=float(rollout_index), metadata={"seed": str(seed)})

    async def judge(self, group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        await asyncio.sleep(0.001)
        self.judged[str(group.metadata["scenario_id"])] += 1
        return group

    def pipeline(self) -> Pipeline:
        sizes = {"rollouts_per_group": 2, "groups_per_step": 2, "max_staleness": 1, "max_concurrent": 6}
        return art.pipeline(
            self.backend.model(), scenarios=SCENARIOS, rollout=self.rollout, after_each=self.judge,
            **sizes | self.settings,
        )  # fmt: skip

    async def run(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Run the program, to its end or until it is killed. Returns whether it came to its end."""
        task = asyncio.create_task(self._train())
        while not task.done() and not until():
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
            return True
        return False

    @property
    def num_events(self) -> int:
        """Number of rollouts and judgements that ended, and of steps that were submitted."""
        return self.finished.total() + self.judged.total() + len(self.backend.calls)

    async def _train(self) -> None:
        async for _ in self.pipeline().train(self.steps):
            pass

    def trained(self) -> Counter[str]:
        """How often each scenario was trained."""
        return Counter(str(group.metadata["scenario_id"]) for call in self.backend.calls for group in call.groups)

    def trained_seeds(self) -> set[str]:
        return {t.metadata["seed"] for call in self.backend.calls for group in call.groups for t in group}

    def rows(self) -> list[int]:
        path = self.backend.folder / "shop/models/agent/history.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("seed", SEEDS)
async def test_kills_at_any_moment_change_nothing_about_what_is_trained(tmp_path: Path, seed: int) -> None:
    undisturbed, killed = Script(tmp_path / "a"), Script(tmp_path / "b")
    assert await undisturbed.run()
    rng = random.Random(seed)
    num_kills = 0
    while True:
        last = killed.num_events + rng.randint(0, 12)
        if await killed.run(lambda last=last: killed.num_events > last):  # type: ignore[misc]
            break
        num_kills += 1
        assert num_kills < 200
    assert num_kills > 1
    assert killed.trained() == undisturbed.trained()
    assert killed.trained_seeds() == undisturbed.trained_seeds()
    assert killed.rows() == undisturbed.rows() == [1, 2, 3, 4, 5]
    assert max(killed.finished.values()) <= 2  # again only if the kill came before it was written down
    assert [call.step for call in killed.backend.calls] == [0, 1, 2, 3, 4]


async def test_a_step_that_was_submitted_is_not_trained_twice(tmp_path: Path) -> None:
    script = Script(tmp_path, max_staleness=0)
    script.backend.train_s = 0.1
    assert not await script.run(lambda: bool(script.backend.calls))
    steps = [step async for step in script.pipeline().train(2)]
    assert [step.number for step in steps] == [1, 2]
    assert [call.step for call in script.backend.calls] == [0, 1]
    assert sum(script.judged.values()) == 4
    assert script.rows() == [1, 2]


async def test_a_submitted_step_that_failed_meanwhile_is_begun_again(tmp_path: Path) -> None:
    script = Script(tmp_path, max_staleness=0)
    script.backend.train_s = 0.1
    assert not await script.run(lambda: bool(script.backend.calls))
    script.backend.fail = lambda call: TrainingError("lost") if len(script.backend.calls) == 1 else None
    steps = [step async for step in script.pipeline().train(1)]
    assert [step.number for step in steps] == [1]
    first, second = script.backend.calls
    assert [g.metadata for g in first.groups] == [g.metadata for g in second.groups]
    assert sum(script.judged.values()) == 2


async def test_groups_that_became_too_stale_are_run_again(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.backend.fail = lambda call: TrainingError("no") if call.step == 1 else None
    with pytest.raises(TrainingError):
        await script.run()
    script.backend.fail = lambda call: None
    script.backend.step = 4  # somebody trained the model otherwise
    async for step in script.pipeline().train(6):
        assert step.staleness_max <= 1
    assert script.trained() == Counter({"s0": 2, "s1": 2, "s2": 2, "s3": 1, "s4": 1}) or sum(
        script.trained().values()
    ) == 2 * len(script.backend.calls)


async def test_other_scenarios_and_sizes_are_refused_while_groups_are_under_way(tmp_path: Path) -> None:
    script = Script(tmp_path)
    assert not await script.run(lambda: script.num_events > 3)
    script.settings = {"rollouts_per_group": 3}
    with pytest.raises(ConfigError, match="rollouts_per_group = 3, was 2"):
        await script.run()


async def test_evaluations_beside_the_training_and_after_a_kill(tmp_path: Path) -> None:
    backend = ScriptedBackend(tmp_path)
    asked: list[tuple[str, int | None]] = []
    slow = asyncio.Event()

    async def evaluate(model: Any, scenario: dict[str, str], rollout_index: int) -> art.Trajectory:
        name = model.get_inference_name()
        if name.endswith("@2") and not slow.is_set() and rollout_index:
            await asyncio.sleep(60)
        asked.append((name, rollout_index))
        return art.Trajectory(reward=float(name.rpartition("@")[2]) / 10)

    async def rollout(model: Any, scenario: dict[str, str], rollout_index: int) -> art.Trajectory:
        return art.Trajectory(reward=float(rollout_index))

    def pipeline() -> Pipeline:
        return art.pipeline(
            backend.model(), scenarios=SCENARIOS, rollout=rollout, evaluate=(SCENARIOS[:3], evaluate), every=2,
            rollouts_per_group=2, groups_per_step=2, max_concurrent=None,
        )  # fmt: skip

    steps = []
    async for step in pipeline().train(6):
        steps.append(step)
        await asyncio.sleep(0.02)
        if step.number == 3:
            break
    await asyncio.sleep(0.05)
    assert [e.step for step in steps for e in step.evaluations] == [0]
    slow.set()
    asked.clear()
    steps = [step async for step in pipeline().train(6)]
    evaluations = {e.step: e for step in steps for e in step.evaluations}
    assert [step.findings for step in steps] == [[]] * 3
    assert sorted(evaluations) == [2, 4, 6]
    assert Counter(asked)["shop/agent@2", 0] == 0  # this rollout had ended before the kill
    assert steps[-1].evaluation is evaluations[6]
    assert evaluations[4].mean == pytest.approx(0.4)
    assert evaluations[4].change is not None
    assert evaluations[4].change.mean == pytest.approx(0.4)
    assert "evaluation of checkpoint 6: 0.600" in steps[-1].line()
    rows = [json.loads(line) for line in (tmp_path / "shop/models/agent/history.jsonl").read_text().splitlines()]
    assert sorted(row["step"] for row in rows if "val/reward" in row) == [0, 2, 4, 6]


async def test_held_out_rollouts_have_the_ids_of_their_scenarios(tmp_path: Path) -> None:
    backend = ScriptedBackend(tmp_path)

    async def rollout(model: Any, scenario: dict[str, str], rollout_index: int) -> art.Trajectory:
        return art.Trajectory(reward=float(rollout_index))

    pipeline = art.pipeline(
        backend.model(), scenarios=SCENARIOS, rollout=rollout, evaluate=SCENARIOS[:3], every=2, rollouts_per_group=2,
        groups_per_step=2, max_concurrent=None,
    )  # fmt: skip
    steps = [step async for step in pipeline.train(1)]
    (last,) = [evaluation for step in steps for evaluation in step.evaluations if evaluation.step == 1]
    assert [trajectory.metadata.get("scenario_id") for trajectory in last.trajectories] == ["s0", "s1", "s2"]


class RecordedScript(Script):
    """A program whose server records an answer of each rollout, and refuses to train rollouts without their answer."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.recorded: set[str] = set()
        self.findings: list[str] = []
        self.backend.missing_exchanges = self.missing  # type: ignore[method-assign]
        self.backend.fail = self.refuse

    async def rollout(self, model: Any, scenario: dict[str, str], rollout_index: int, seed: int) -> art.Trajectory:
        trajectory = await super().rollout(model, scenario, rollout_index, seed)
        times = self.finished[scenario["id"], rollout_index, seed]
        exchange_id = f"ex-{seed}-{times}"
        self.recorded.add(exchange_id)
        trajectory.messages_and_choices = [{"role": "user", "content": "?"}, answer("yes", exchange_id)]
        return trajectory

    async def missing(self, model: Any, exchange_ids: list[str]) -> list[str]:
        return sorted(set(exchange_ids) - self.recorded)

    def refuse(self, call: TrainCall) -> ArtError | None:
        named = {t.messages_and_choices[-1].exchange_id for group in call.groups for t in group}  # type: ignore[union-attr]
        return TrajectoryMismatchError("is not recorded on this server") if named - self.recorded else None

    async def _train(self) -> None:
        async for step in self.pipeline().train(self.steps):
            self.findings += step.findings


@pytest.mark.parametrize("seed", SEEDS)
async def test_rollouts_whose_answers_the_server_has_lost_are_run_again(tmp_path: Path, seed: int) -> None:
    undisturbed, script = RecordedScript(tmp_path / "a"), RecordedScript(tmp_path / "b")
    assert await undisturbed.run()
    rng = random.Random(seed)
    for _ in range(8):
        until = script.num_events + rng.randint(3, 12)
        if await script.run(lambda until=until: script.num_events > until):  # type: ignore[misc]
            break
        trained = {t.metadata["seed"] for call in script.backend.calls for group in call.groups for t in group}
        waiting = sorted(one for one in script.recorded if one.split("-")[1] not in trained)
        script.recorded -= set(rng.sample(waiting, len(waiting) // 2))
    assert await script.run()
    assert any("recorded answers in rollouts of an earlier run" in finding for finding in script.findings)
    assert script.trained() == undisturbed.trained()
    assert script.trained_seeds() == undisturbed.trained_seeds()
    assert script.rows() == [1, 2, 3, 4, 5]


async def test_a_step_whose_job_and_answers_are_lost_is_begun_again(tmp_path: Path) -> None:
    script = RecordedScript(tmp_path, max_staleness=0)
    script.backend.train_s = 0.1
    assert not await script.run(lambda: bool(script.backend.calls))
    for task in script.backend.jobs.values():
        task.cancel()
    script.backend.jobs.clear()
    lost = script.recorded.pop()
    script.backend.train_s = 0.0
    steps = [step async for step in script.pipeline().train(1)]
    assert [step.number for step in steps] == [1]
    assert "does not have 1 of the 4 recorded answers" in steps[0].findings[0]
    assert sorted(script.finished.values()) == [1, 1, 2, 2]  # a group that was judged is run again as a whole
    assert lost not in script.recorded
