"""`scenarios.json`: the scenarios of MCP-RL, written once, which may be edited.

{"server": "...", "tools": ["get_product"], "generator": "openai/o3",
 "train": [{"task": "Count the desks.", "difficulty": 1}], "held_out": [...]}
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
class ScenarioFile:
    """The content of `scenarios.json`: the scenarios that MCP-RL trains on and tests with."""

    path: Path
    server: str
    tools: Sequence[str]
    """Names of the tools that the scenarios were written for."""
    generator: str
    train: Sequence[GeneratedScenario]
    held_out: Sequence[GeneratedScenario]

    def save(self) -> None:
        sides = {"train": [s.to_dict() for s in self.train], "held_out": [s.to_dict() for s in self.held_out]}
        content = {"server": self.server, "tools": list(self.tools), "generator": self.generator, **sides}
        write_file(self.path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def scenario_path(out: Path) -> Path:
    return out / "scenarios.json"


def load_scenarios(out: Path) -> ScenarioFile | None:
    """The scenarios in the folder `out`; `None` if none are written yet.

    Raises:
        ConfigError: the file was edited and cannot be used; the message says what is wrong with it.
    """
    path = scenario_path(out)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sides = {side: [GeneratedScenario.from_dict(row) for row in content[side]] for side in ("train", "held_out")}
        scenarios = ScenarioFile(
            path=path, server=content.get("server", ""), tools=content.get("tools", []),
            generator=content.get("generator", ""), train=sides["train"], held_out=sides["held_out"],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{path} should hold {{"train": [{{"task": "...", "difficulty": 1}}, ...], "held_out": [...]}}: '
            f"{type(error).__name__} {error}. Mend it, or delete it to have new scenarios written"
        ) from None
    for side, rows in sides.items():
        if not rows:
            raise ConfigError(f"{path} has no scenarios in {side!r}")
    trained = {words_of(scenario.task) for scenario in scenarios.train}
    if both := [scenario.task for scenario in scenarios.held_out if words_of(scenario.task) in trained]:
        raise ConfigError(f"{path}: {both[0]!r} is trained on, so it cannot be held out too")
    return scenarios
