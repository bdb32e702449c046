"""`art mcp-rl` from the tools of a real server to the report; and whether a tiny model learns to use the tools."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import art
from art.cli.main import main
from art.testing.judge import ScriptedJudge
from art.testing.scripted_server import Reply, ScriptedServer, failure
from art.testing.tiny_model import build_tiny_model
from tests.support.shared_server import on

pytest.importorskip("mcp")

EXAMPLES = Path(__file__).parents[2] / "examples" / "mcp_servers"


@pytest.fixture
def practice(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the examples that writes and judges by a script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import practice

    return practice


@pytest.fixture
def server(practice: Any) -> Iterator[str]:
    import try_it

    with try_it.serving("inventory") as url:
        yield url


def short_is_good(trajectory: dict[str, Any]) -> tuple[float, str]:
    """A standard that rollouts of an untrained model differ in."""
    length = len(json.dumps(trajectory["messages"]))
    return 1 / (1 + length / 100), f"It has {length} characters."


@pytest.fixture
def untrained(practice: Any, tmp_path: Path) -> Path:
    """A model that says anything; it has 1024 tokens of context, which the descriptions of 7 tools exceed."""
    play = practice.Inventory().warm_start_conversations(random.Random(0), 60)
    play = [conversation for conversation in play if conversation.tools is None]  # the others are longer than that
    return Path(build_tiny_model(tmp_path / "model", conversations=play, warm_start_steps=0))


class Script:
    """Writes scenarios, and judges unless it is down."""

    def __init__(self, inventory: Any) -> None:
        self.inventory, self.judge, self.is_down = inventory, ScriptedJudge(short_is_good), False

    def reply(self, body: dict[str, Any]) -> Reply:
        if body["response_format"]["json_schema"]["name"] == "scenarios":
            return cast("Reply", self.inventory.reply(body))
        return failure(401, "no such key") if self.is_down else self.judge.answer(body)


def command(server: str, model: Path, judge_url: str, folder: Path) -> list[str]:
    return [
        "mcp-rl", server, "--model", str(model), "--name", "shop", "--judge", "openai/judge", "--judge-url", judge_url,
        "--num-scenarios", "4", "--held-out", "3", "--groups", "2", "--rollouts", "3", "--held-out-rollouts", "1", "--steps",
        "1", "--learning-rate", "1e-3", "--out", str(folder / "out"), "--data-dir", str(folder / "data"),
        "--max-completion-tokens", "8", "--tools", "get_product",
    ]  # fmt: skip


def test_one_command(
    practice: Any, server: str, untrained: Path, shared_backend: art.LocalBackend, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    opened = on(shared_backend)
    monkeypatch.setattr("art_recipes.mcprl.LocalBackend", opened)
    with ScriptedServer(Script(practice.Inventory()).reply) as scripted:
        assert main(command(server, untrained, scripted.base_url, tmp_path)) == 0
    assert opened.asked_for == [tmp_path / "data"]
    plan = json.loads((tmp_path / "out" / "scenarios.json").read_text())
    assert (plan["tools"], len(plan["train"]), len(plan["held_out"])) == (["get_product"], 4, 3)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert "after 1 steps" in report["summary"]
    assert {row["scenario"] for row in report["comparisons"]} == {row["task"] for row in plan["held_out"]}
    assert report["headline"]["change"]["count"] == 3
    assert len(report["rewards"]) == 1
    explanations = {c[side]["explanation"] for c in report["comparisons"] for side in ("before", "after")}
    assert all(text.startswith("It has ") for text in explanations)
    assert {"train/judge/ruler", "eval/judge/ruler", "generator"} <= {
        line.split()[0] for line in report["costs"].splitlines()
    }
    assert plan["held_out"][0]["task"] in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_what_stops_a_run_is_said_and_the_next_call_goes_on(
    practice: Any, server: str, untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(practice.Inventory())
    out = tmp_path / "out"
    with ScriptedServer(script.reply) as scripted:
        usual = command(server, untrained, scripted.base_url, tmp_path)
        assert main(usual[:-2]) == 1
        assert "do not fit the model's context; leave some out with --tools" in capsys.readouterr().err
        script.is_down = True
        assert main(usual) == 1
        stopped = json.loads((out / "report.json").read_text())
        assert "no such key" in stopped["faults"][0]
        assert stopped["headline"] is None
        plan = json.loads((out / "scenarios.json").read_text())
        plan["held_out"][0]["task"] = "What is the price of a desk, please?"
        (out / "scenarios.json").write_text(json.dumps(plan))
        script.is_down = False
        assert main(usual) == 0
        assert main([*usual, "--steps", "2"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert "after 2 steps" in report["summary"]
    assert len(report["rewards"]) == 2
    assert "What is the price of a desk, please?" in {row["scenario"] for row in report["comparisons"]}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["inventory", "calendar"])
def test_a_tiny_model_learns_to_use_the_tools(name: str, tmp_path: Path) -> None:
    changes = []
    for seed in (0, 1, 2):
        command = [sys.executable, str(EXAMPLES / "try_it.py"), name, "--seed", str(seed), "--out", str(tmp_path)]
        subprocess.run(command, check=True)
        headline = json.loads((tmp_path / f"{name}-seed{seed}" / "report.json").read_text())["headline"]
        changes.append(headline["change"]["mean"])
    assert min(changes) > 0, changes
    assert sum(changes) / 3 > 0.1, changes
