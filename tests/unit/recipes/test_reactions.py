"""Findings that end a training, with or without the checkpoint from before."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from art.asynchronous.step import PipelineStep
from art.cli.arguments import add_recipe_options, config_of
from art.errors import ConfigError
from art.metrics.findings import RULES
from art.recipes import training_loop
from art.recipes.recipe_config import Fork, Reactions
from art.recipes.task_training import TaskTrainingConfig
from art.recipes.training_loop import StepReport, train_task
from art.tasks.yes_no_maybe import YesNoMaybe
from art.trajectory import Trajectory, TrajectoryGroup


class Checkpoints:
    """Keeps all steps but the fifth."""

    def __init__(self) -> None:
        self.forks: list[tuple[Fork, str, int]] = []

    async def fork(self, target: Fork, source: Any, *, not_after_step: int) -> int:
        self.forks.append((target, source.name, not_after_step))
        return not_after_step - 1 if not_after_step == 5 else not_after_step


class Model:
    name, project, base_model = "agent", "shop", "hub/base"

    def __init__(self) -> None:
        self.checkpoints = Checkpoints()
        self.costs = SimpleNamespace(check=lambda: None)

    def backend(self) -> Any:
        return SimpleNamespace(checkpoints=self.checkpoints)

    def merge_state(self, state: dict[str, int]) -> None:
        self.state = state

    async def record_settings(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    async def get_step(self) -> int:
        return 0


def metrics(*findings: str) -> dict[str, float]:
    return {"loss/train": 0.1, **{f"findings/{name}": 1.0 for name in findings}}


async def test_only_named_findings_end_a_training() -> None:
    model: Any = Model()
    stop = Reactions(stop_on=["entropy_gone"])
    assert await stop.end(model, metrics("many_clipped"), 3) is None
    reason = await stop.end(model, metrics("many_clipped", "entropy_gone"), 3)
    assert reason == (
        f"the step has the finding 'entropy_gone': {RULES['entropy_gone'].meaning}. {RULES['entropy_gone'].advice}"
    )
    assert model.checkpoints.forks == []


async def test_a_rollback_copies_the_newest_checkpoint_from_before() -> None:
    model: Any = Model()
    reactions = Reactions(stop_on=["many_clipped"], rollback_on=["entropy_fell"])
    reason = await reactions.end(model, metrics("many_clipped", "entropy_fell"), 6)
    assert model.checkpoints.forks == [(Fork("agent-before-6", "shop"), "agent", 5)]
    assert reason is not None
    assert "Checkpoint 4 from before it is the model 'agent-before-6' now" in reason


def test_unknown_findings_are_refused() -> None:
    for name in ("stop_on", "rollback_on"):
        with pytest.raises(
            ConfigError, match=f"`{name}`: there is no finding 'entropy'; there are sampler_gap, .*far_"
        ):
            TaskTrainingConfig(**{name: ("entropy", "many_clipped")})
        with pytest.raises(ConfigError, match="there is no finding 'entropy'"):
            Reactions(**{name: ["entropy"]})


@pytest.mark.parametrize(("trained", "num_steps"), [(True, 2), (False, 4)])
async def test_the_loop_ends_after_the_step_with_the_finding(
    trained: bool, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that made no checkpoint has nothing to roll back."""

    async def steps(self: Any, *args: Any) -> AsyncIterator[PipelineStep]:
        for index in range(4):
            found = metrics("too_hard") if index == 1 else metrics()
            group = TrajectoryGroup([Trajectory(reward=1.0, metrics={"maybe": 1.0})])
            yield PipelineStep(
                number=index + 1, trained=trained or index != 1, groups=[group], reward=0.0, metrics=found
            )

    monkeypatch.setattr(training_loop._Loop, "steps", steps)
    model: Any = Model()
    seen: list[StepReport] = []
    task = YesNoMaybe()
    reactions = TaskTrainingConfig(rollback_on=("too_hard",)).reactions()
    reports = await train_task(
        model, task, task.defaults, num_steps=4, seed=0, on_step=seen.append, reactions=reactions
    )
    assert seen == reports
    assert model.state == {"num_steps": 4}
    assert len(reports) == num_steps
    assert [report.ending is not None for report in reports] == [False, True] if trained else [False] * 4
    assert [fork[2] for fork in model.checkpoints.forks] == ([1] if trained else [])


def test_names_on_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_recipe_options(parser, TaskTrainingConfig, "a judge")
    config = config_of(TaskTrainingConfig, parser.parse_args(["--stop-on", "too_easy", "entropy_gone"]))
    assert (config.stop_on, config.rollback_on) == (("too_easy", "entropy_gone"), ())
    with pytest.raises(ConfigError, match="`--rollback-on`: there is no finding 'x'"):
        config_of(TaskTrainingConfig, parser.parse_args(["--rollback-on", "x"]))
