"""What `art mcp-rl` keeps in its folder, beside the report.

scenarios.json     the scenarios, written once; may be edited
evaluation.jsonl   the rollouts of the held-out scenarios with their scores, before and after
seconds.json       wall time by what it was spent on, over all calls
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.comparison import CheckpointComparison, ComparedScenario
from art.errors import ConfigError
from art.mcp import GeneratedScenario
from art.scenarios.words import words_of
from art.task import Scenario
from art.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The scenarios of a run."""

    path: Path
    server: str
    tools: Sequence[str]
    """For which they were written."""
    generator: str
    train: Sequence[GeneratedScenario]
    held_out: Sequence[GeneratedScenario]


def save_plan(
    out: Path,
    server: str,
    tools: Sequence[str],
    generator: str,
    train: Sequence[GeneratedScenario],
    held_out: Sequence[GeneratedScenario],
) -> Plan:
    sides = {"train": [s.to_dict() for s in train], "held_out": [s.to_dict() for s in held_out]}
    content = {"server": server, "tools": list(tools), "generator": generator, **sides}
    path = out / "scenarios.json"
    _write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return Plan(path=path, server=server, tools=tools, generator=generator, train=train, held_out=held_out)


def load_plan(out: Path) -> Plan | None:
    """What `save_plan` wrote, and people may have edited; `None` if there is none.

    Raises:
        ConfigError: the file cannot be used; says what is wrong with it.
    """
    path = out / "scenarios.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sides = {side: [GeneratedScenario.from_dict(row) for row in content[side]] for side in ("train", "held_out")}
        plan = Plan(
            path=path, server=content.get("server", ""), tools=content.get("tools", []),
            generator=content.get("generator", ""), train=sides["train"], held_out=sides["held_out"],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{path} should hold {{"train": [{{"task": "...", "difficulty": 1}}, ...], "held_out": [...]}}: '
            f"{type(error).__name__} {error}. Mend it, or delete it to have new scenarios written"
        ) from None
    for side, scenarios in sides.items():
        if not scenarios:
            raise ConfigError(f"{path} has no scenarios in {side!r}")
    trained = {words_of(scenario.task) for scenario in plan.train}
    if both := [scenario.task for scenario in plan.held_out if words_of(scenario.task) in trained]:
        raise ConfigError(f"{path}: {both[0]!r} is trained on, so it cannot be held out too")
    return plan


def save_comparison(out: Path, comparison: CheckpointComparison, *, step: int, rollouts: int) -> None:
    head = {
        "step": step, "rollouts": rollouts, "num_left_out": comparison.num_left_out,
        "num_failed_rollouts": comparison.num_failed_rollouts, "seconds": comparison.seconds,
    }  # fmt: skip
    rows: list[dict[str, Any]] = [head]
    for item in comparison.compared:
        sides = {"before": item.before, "after": item.after}
        rows.append(
            {"scenario": item.scenario.model_dump(mode="json")}
            | {side: [t.model_dump(mode="json") for t in trajectories] for side, trajectories in sides.items()}
        )
    _write(out / "evaluation.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def load_comparison(
    out: Path, *, step: int, rollouts: int, scenarios: Sequence[Scenario]
) -> CheckpointComparison | None:
    """What `save_comparison` wrote for that step and those scenarios; `None` if there is none."""
    path = out / "evaluation.jsonl"
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
    same = (head["step"], head["rollouts"]) == (step, rollouts)
    if not same or head["num_left_out"] or [item.scenario for item in compared] != list(scenarios):
        return None
    return CheckpointComparison(
        compared=compared, num_left_out=0, num_failed_rollouts=head["num_failed_rollouts"], seconds=head["seconds"]
    )


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
        _write(self.path, json.dumps(self.seconds, indent=2) + "\n")

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - started)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
