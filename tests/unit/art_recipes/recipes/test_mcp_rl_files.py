"""`art mcp-rl` without a model: its files, its options, and the report that it makes of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from art.errors import ConfigError
from art.model.run_settings import command_line
from art.rewards import Ruler
from art.storage.history import append_row
from art.storage.layout import DataDir
from art.trajectory import Trajectory
from art_recipes import mcp_rl_command as mcp_rl
from art_recipes.judged import JudgedRun
from art_recipes.mcp import GeneratedScenario, McpTask
from art_recipes.mcp_rl_command import read_env, read_headers
from art_recipes.mcprl import (
    McpRlConfig,
    ScenarioFile,
    describe_run,
    load_scenarios,
    name_after,
    scenario_path,
)
from art_recipes.report import render_report
from art_recipes.training.comparison import CheckpointComparison, ComparedScenario

TRAIN = [GeneratedScenario("Count the desks.", 1), GeneratedScenario("Sell a lamp.", 2)]
HELD_OUT = [GeneratedScenario("Price a chair.", 1), GeneratedScenario("Order shelves.", 3)]
TASK = McpTask("server", train=TRAIN, held_out=HELD_OUT)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    mcp_rl.add_options(parser)
    return parser.parse_args(list(arguments))


# -- scenarios.json --


def written(out: Path, server: str, tools: list[str]) -> ScenarioFile:
    scenarios = ScenarioFile(
        path=scenario_path(out), server=server, tools=tools, generator="writer", train=TRAIN, held_out=HELD_OUT
    )
    scenarios.save()
    return scenarios


def test_scenarios_are_kept_and_may_be_edited(tmp_path: Path) -> None:
    assert load_scenarios(tmp_path) is None
    scenarios = written(tmp_path, "server", ["a", "b"])
    assert load_scenarios(tmp_path) == scenarios
    content = json.loads(scenarios.path.read_text())
    assert content["held_out"][1] == {"task": "Order shelves.", "difficulty": 3}
    content["train"].append({"task": "Find what runs low.", "difficulty": 5})
    scenarios.path.write_text(json.dumps({"train": content["train"], "held_out": content["held_out"]}))
    edited = load_scenarios(tmp_path)
    assert edited is not None
    assert [scenario.task for scenario in edited.train] == ["Count the desks.", "Sell a lamp.", "Find what runs low."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "should hold"),
        ('{"train": []}', "held_out"),
        ('{"train": [{"task": "a"}], "held_out": []}', "GeneratedScenario has the fields"),
        ('{"train": [{"task": "a", "difficulty": 9}], "held_out": []}', "from 1 to 5, got 9"),
        ("[]", "should hold"),
        ('{"train": [{"task": "a", "difficulty": 1}], "held_out": []}', "no scenarios in 'held_out'"),
        ('{"train": [{"task": "Sell it.", "difficulty": 1}], "held_out": [{"task": "sell it", "difficulty": 1}]}',
         "'sell it' is trained on"),
    ],
)  # fmt: skip
def test_an_edited_file_that_cannot_be_used(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "scenarios.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_scenarios(tmp_path)
    assert "scenarios.json" in caught.value.message


# -- the report --


def trajectory(score: float, ending: str = "completed") -> Trajectory:
    call = {"id": "c", "type": "function", "function": {"name": "get_product", "arguments": "{}"}}
    return Trajectory(
        messages_and_choices=[
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": "c", "content": "Error: no"},
        ],
        reward=score, metrics={"num_tool_errors": 1}, metadata={"ending": ending},
        logs=[f"RULER explanation: worth {score}"],
    )  # fmt: skip


def compared(*scores: tuple[float, float], **counts: int) -> CheckpointComparison:
    scenarios = TASK.scenarios("test", seed=0, count=len(scores))
    return CheckpointComparison(
        compared=[
            ComparedScenario(scenario=scenario, before=[trajectory(old)], after=[trajectory(new, "out_of_turns")])
            for scenario, (old, new) in zip(scenarios, scores, strict=True)
        ],
        num_left_out=counts.get("num_left_out", 0), num_failed_rollouts=counts.get("num_failed_rollouts", 0),
    )  # fmt: skip


# -- options --


@pytest.mark.parametrize(
    ("server", "name"),
    [
        ("python examples/mcp_servers/inventory/server.py --db x.db", "inventory-server"),
        ("/usr/bin/python3 /srv/tool.py", "srv-tool"),
        ("npx -y @modelcontextprotocol/server-github", "modelcontextprotocol-server-github"),
        ("uvx mcp-server-time", "mcp-server-time"),
        ("https://mcp.example.org:8443/v1/mcp", "mcp-example-org-8443"),
        ("---", "server"),
    ],
)
def test_a_name_after_the_server(server: str, name: str) -> None:
    assert name_after(server) == name


def test_keys_come_from_the_environment_and_stay_out_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    assert read_headers(["Authorization: Bearer $TOKEN", "x-a:${TOKEN}"]) == {
        "Authorization": "Bearer s3cret", "x-a": "s3cret"
    }  # fmt: skip
    assert read_env(["TOKEN", "A=b=c"]) == {"TOKEN": "s3cret", "A": "b=c"}
    with pytest.raises(ConfigError, match="MISSING is not set"):
        read_headers(["Authorization: $MISSING"])
    with pytest.raises(ConfigError, match="'NAME: VALUE'") as caught:
        read_headers(["Bearer s3cret"])
    assert "s3cret" not in caught.value.message
    shown = command_line(
        ["art", "mcp-rl", "http://a", "--header", "Authorization: Bearer s3cret", "--header=X: s3cret", "--header",
         "Y: $TOKEN", "--server-env", "KEY=s3cret", "--server-env", "TOKEN", "--steps", "3"]
    )  # fmt: skip
    assert "s3cret" not in shown
    assert shown == (
        "art mcp-rl http://a --header 'Authorization: ...' '--header=X: ...' --header 'Y: $TOKEN' "
        "--server-env 'KEY= ...' --server-env TOKEN --steps 3"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-scenarios", "0"], "`--num-scenarios` must be greater than or equal to 1, got 0"),
        (["--held-out", "-1"], "--held-out"),
    ],
)
def test_bad_numbers(arguments: list[str], message: str) -> None:
    args = parse("server", "--model", "m", *arguments)
    with pytest.raises(ConfigError, match=message):
        mcp_rl.run(args)


# -- the report --


def report_of(tmp_path: Path, comparison: CheckpointComparison | None, **fields: Any) -> Any:
    config = McpRlConfig(base_model="some/base", name="shop", data_dir=tmp_path / "data", steps=7, judge="openai/o3")
    model = config.make_model()
    model.costs.book("judge/ruler", usd=0.25, prompt_tokens=1000, completion_tokens=80)
    model.costs.book("generator", usd=None, prompt_tokens=500, completion_tokens=60)
    history = DataDir(tmp_path / "data").model("mcp-rl", "shop").history
    history.parent.mkdir(parents=True, exist_ok=True)
    for step in (1, 2):
        append_row(history, {"train/reward": step / 10, "train/completed": 1.0}, step=step)
    run = JudgedRun(
        config=config, command="art mcp-rl ...", task=TASK, judge=Ruler("openai/o3"), out=tmp_path, model=model,
        step=2, comparison=comparison, **fields,
    )  # fmt: skip
    return describe_run(run, written(tmp_path, "http://server/mcp", ["get_product"]))


def test_the_report_of_a_run(tmp_path: Path) -> None:
    report = report_of(tmp_path, compared((0.1, 0.9), (0.4, 0.3)))
    assert "after 2 steps" in report.summary
    headline = report.headline
    assert (headline.before.mean, headline.after.mean, headline.change.mean) == pytest.approx((0.25, 0.6, 0.35))
    assert list(report.rewards) == [(1, 0.1), (2, 0.2)]
    gain, loss = report.comparisons
    assert (gain.scenario, gain.before_score, gain.after_score) == ("Price a chair.", 0.1, 0.9)
    assert (loss.scenario, loss.before_score, loss.after_score) == ("Order shelves.", 0.4, 0.3)
    assert (gain.after.explanation, gain.after.note) == ("worth 0.9", "out of turns, 1 failed calls")
    costs = {line.split()[0]: line for line in report.costs.splitlines()}
    assert "0.2500 USD" in costs["judge/ruler"]
    assert "no price" in costs["generator"]
    assert report.faults[0].startswith("Nothing")
    assert report.command == "art mcp-rl ..."
    html = render_report(report)
    for text in ("Price a chair.", "Order shelves.", "art mcp-rl ...", "worth 0.9", "RULER"):
        assert text in html


def test_what_went_wrong_is_in_the_report(tmp_path: Path) -> None:
    report = report_of(tmp_path, None, stopped="the judge is down", groups_without_scores=4)
    assert report.headline is None
    assert report.faults == [
        "The run ended early: the judge is down",
        "4 groups of the last call got no scores from the judge and were left out.",
    ]
    partial = report_of(tmp_path, compared((0.1, 0.9), num_left_out=1, num_failed_rollouts=2))
    assert [fault.split()[0] for fault in partial.faults] == ["1", "2"]
    assert report_of(tmp_path, compared(num_left_out=2)).headline is None, "no scores are no score of 0"
