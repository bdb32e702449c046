"""`art mcp-rl` from the tools of a real server to the report; and whether a tiny model learns to use the tools."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art.cli.main import main
from art.testing.judge import ScriptedJudge
from art.testing.scripted_server import Reply, ScriptedServer

pytest.importorskip("mcp")
pytest.importorskip("litellm")

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


def says_yes(trajectory: dict[str, Any]) -> tuple[float, str]:
    """What the model of these tests can learn: it says yes, no or maybe, whatever it is asked."""
    said = str(trajectory["messages"][-1]["content"]).lower()
    return (0.9, "It says yes.") if "yes" in said else (0.2, "It does not say yes.")


def test_one_command(practice: Any, server: str, tiny_model: Path, tmp_path: Path) -> None:
    inventory = practice.Inventory()
    judge = ScriptedJudge(says_yes)
    down = {"is": True}

    def reply(body: dict[str, Any]) -> Reply:
        asks_for_scenarios = body["response_format"]["json_schema"]["name"] == "scenarios"
        if down["is"] and not asks_for_scenarios:
            return 401, {"error": {"message": "no such key", "code": None}}
        return inventory.reply(body) if asks_for_scenarios else judge.answer(body)

    out = tmp_path / "out"
    with ScriptedServer(reply) as scripted:
        command = [
            "mcp-rl", server, "--model", str(tiny_model), "--name", "shop", "--tools", "get_product", "--judge",
            "openai/judge", "--judge-url", scripted.base_url, "--num-scenarios", "4", "--held-out", "3", "--groups",
            "3", "--rollouts", "4", "--evaluate", "2", "--steps", "1", "--learning-rate", "1e-3", "--out", str(out),
            "--data-dir", str(tmp_path / "data"), "--max-completion-tokens", "8",
        ]  # fmt: skip
        assert main(command) == 1, "a judge that is down ends the run"
        stopped = json.loads((out / "report.json").read_text())
        assert "no such key" in stopped["faults"][0]
        assert stopped["headline"] is None
        plan = json.loads((out / "scenarios.json").read_text())
        assert (plan["tools"], len(plan["train"]), len(plan["held_out"])) == (["get_product"], 4, 3)
        plan["held_out"][0]["task"] = "What is the price of a desk, please?"
        (out / "scenarios.json").write_text(json.dumps(plan))
        down["is"] = False
        assert main(command) == 0
    report = json.loads((out / "report.json").read_text())
    assert "after 1 steps" in report["summary"]
    assert {row["scenario"] for row in report["scenarios"]} == {row["task"] for row in plan["held_out"]}
    assert report["headline"]["change"]["count"] == 3
    assert len(report["curves"][0]["points"]) == 1
    explanations = {c[side]["explanation"] for c in report["comparisons"] for side in ("before", "after")}
    assert explanations <= {"It says yes.", "It does not say yes."}
    assert {"train/judge/ruler", "eval/judge/ruler", "generator"} <= {row[0] for row in report["costs"]["rows"]}
    assert (out / "report.html").read_text().count("What is the price of a desk, please?") >= 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["inventory", "calendar"])
def test_a_tiny_model_learns_to_use_the_tools(name: str, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        command = [sys.executable, str(EXAMPLES / "try_it.py"), name, "--seed", str(seed), "--out", str(tmp_path)]
        subprocess.run(command, check=True)
        headline = json.loads((tmp_path / f"{name}-seed{seed}" / "report.json").read_text())["headline"]
        assert headline["change"]["low"] > 0, f"seed {seed}: {headline}"
