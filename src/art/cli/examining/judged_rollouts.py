"""The judge of `art doctor`: it scores the trial rollouts, as it would score those of a training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art.cli.options.recipe_options import add_settings
from art.model import TrainableModel
from art.protocol.preflight import CheckResult
from art.recipes.task_training import TaskTrainingConfig
from art.rewards import GroupScorer
from art.task import Task
from art.trajectory import TrajectoryGroup


def add_judge_options(parser: argparse.ArgumentParser) -> None:
    what_for = (
        "a language model scores the rollouts, in place of the task's own reward; `art train` has the same options"
    )
    judge = parser.add_argument_group("judge", what_for)
    add_settings(judge, TaskTrainingConfig, "judge", "judge_url", "judge_passes")


def make_scorer(
    args: argparse.Namespace, task: Task, model: TrainableModel[Any, Any], folder: Path
) -> GroupScorer | None:
    """Make what scores the trial rollouts; `None` without `--judge`. A group that it cannot score is kept.

    Args:
        folder: where the judge's answers are cached.
    """
    if args.judge is None:
        return None
    passes = {} if args.judge_passes is None else {"judge_passes": args.judge_passes}
    config = TaskTrainingConfig(judge=args.judge, judge_url=args.judge_url, seed=args.seed, data_dir=folder, **passes)
    return GroupScorer(config.make_judge(model.costs, rubric=task.rubric), on_fault="keep")


def scored(groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Return the groups without those that no judge could score."""
    return [group for group in groups if not _is_unscored(group)]


def _is_unscored(group: TrajectoryGroup) -> bool:
    return group.metadata.get("outcome") == "infra_fault"


def check_scores(groups: Sequence[TrajectoryGroup]) -> CheckResult:
    """Check that the judge scored the groups. What was found has the reason why it could not score the last of them."""
    failed = [group for group in groups if _is_unscored(group)]
    finding = f"{len(groups) - len(failed)} of {len(groups)} groups were scored"
    if not failed:
        return CheckResult(name="judge", status="ok" if groups else "failure", found=finding)
    return CheckResult(
        name="judge", status="failure" if len(failed) == len(groups) else "warning",
        found=f"{finding}; {failed[-1].logs[-1]}",
        remedy="check --judge, --judge-url and the key in OPENAI_API_KEY; `art judge check` measures a judge",
    )  # fmt: skip
