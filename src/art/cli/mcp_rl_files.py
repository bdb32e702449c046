"""What `art mcp-rl` keeps in its folder, beside the report.

scenarios.json     the scenarios, written once; may be edited

The rest is common to runs with a judge (`judged_run`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from art.errors import ConfigError
from art.mcp import GeneratedScenario
from art.scenarios.words import words_of
from art.storage.atomic import write_file


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
    write_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
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
