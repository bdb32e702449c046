"""What commands that train on a judge have in common: train, compare with the untrained policy, keep the clock.

`art mcp-rl` and `art auto` differ in where scenarios come from; from there on both are a task and a judge.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from art.cli.train_options import loop_defaults
from art.comparison import CheckpointComparison, ComparedScenario, compare_checkpoints
from art.model import TrainableModel
from art.rewards import GroupScorer, Ruler
from art.task import Scenario, Task
from art.training_loop import StepReport, train_task
from art.trajectory import Trajectory

MAX_FAILED = 0.25
"""Share of the rollouts of a step that may fail, by whatever is no fault of the policy, before the run ends."""
_EVALUATION = "evaluation.jsonl"


@dataclass(slots=True)
class Clock:
    """Wall time by what it was spent on, over all calls of the command."""

    path: Path
    seconds: dict[str, float]

    @classmethod
    def load(cls, out: Path) -> Clock:
        path = out / "seconds.json"
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds
        write_file(self.path, json.dumps(self.seconds, indent=2) + "\n")

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - started)


@dataclass(slots=True, kw_only=True)
class JudgedRun:
    """One call of a command, and what is known of the run so far."""

    console: Console
    args: argparse.Namespace
    out: Path
    command: str
    task: Task
    model: TrainableModel
    clock: Clock
    step: int = 0
    """The newest checkpoint."""
    comparison: CheckpointComparison | None = None
    groups_without_scores: int = 0
    stopped: str = ""
    """Why it ended before its end."""

    async def train(self, judge: Ruler) -> None:
        """Up to `--steps`, from wherever the model stands."""
        defaults = loop_defaults(self.task.defaults, self.args)
        scorer = GroupScorer(judge, window=defaults.groups_per_step)
        self.console.print(f"{self.model.get_inference_name()} stands at step {self.step} of {defaults.num_steps}")

        def on_step(report: StepReport) -> None:
            self.clock.add("rollouts and judging", report.timing.rollout_s)
            self.clock.add("training", report.timing.train_s)
            self.clock.add("publishing", report.timing.publish_s)
            self.step += report.trained
            line = report.line(self.task.headline_metric)
            self.console.print(f"step {report.step:>4}  {line}", highlight=False, soft_wrap=True)

        try:
            await train_task(
                self.model, self.task, defaults, num_steps=defaults.num_steps, seed=self.args.seed, on_step=on_step,
                score=scorer, max_exceptions=MAX_FAILED,
            )  # fmt: skip
            self.step = await self.model.get_step()
        finally:
            self.groups_without_scores += scorer.num_faults

    async def compare(self, judge: Ruler, scenarios: Sequence[Scenario], *, about: str = "") -> None:
        """The newest checkpoint beside step 0, `--evaluate` rollouts each of every scenario.

        Args:
            about: what else the result depends on. An earlier one is shown again if nothing has changed.
        """
        rollouts, key = self.args.evaluate, {"step": self.step, "rollouts": self.args.evaluate, "about": about}
        self.comparison = load_comparison(self.out, key, scenarios)
        if self.comparison is not None:
            return
        with (
            self.clock.measure("held-out evaluation"),
            self.console.status(f"{len(scenarios)} held-out scenarios, {rollouts} rollouts before and after ..."),
        ):
            self.comparison = await compare_checkpoints(
                self.model, self.task, scenarios, before=0, after=self.step, rollouts=rollouts,
                score=GroupScorer(judge, window=len(scenarios)), max_exceptions=MAX_FAILED,
            )  # fmt: skip
        save_comparison(self.out, key, self.comparison)


def save_comparison(out: Path, key: dict[str, Any], comparison: CheckpointComparison) -> None:
    head = key | {
        "num_left_out": comparison.num_left_out, "num_failed_rollouts": comparison.num_failed_rollouts,
        "seconds": comparison.seconds,
    }  # fmt: skip
    rows: list[dict[str, Any]] = [head]
    for item in comparison.compared:
        sides = {"before": item.before, "after": item.after}
        rows.append(
            {"scenario": item.scenario.model_dump(mode="json")}
            | {side: [t.model_dump(mode="json") for t in trajectories] for side, trajectories in sides.items()}
        )
    write_file(out / _EVALUATION, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def load_comparison(out: Path, key: dict[str, Any], scenarios: Sequence[Scenario]) -> CheckpointComparison | None:
    """What `save_comparison` wrote with that key and for those scenarios; `None` if there is none."""
    path = out / _EVALUATION
    if not path.exists():
        return None
    head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    compared = [
        ComparedScenario(
            scenario=Scenario.model_validate(row["scenario"]),
            before=[Trajectory.model_validate(item) for item in row["before"]],
            after=[Trajectory.model_validate(item) for item in row["after"]],
        )
        for row in rows
    ]
    same = {name: head.get(name) for name in key} == key
    if not same or head["num_left_out"] or [item.scenario for item in compared] != list(scenarios):
        return None
    return CheckpointComparison(
        compared=compared, num_left_out=0, num_failed_rollouts=head["num_failed_rollouts"], seconds=head["seconds"]
    )


def write_file(path: Path, text: str) -> None:
    """All of it or nothing."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
