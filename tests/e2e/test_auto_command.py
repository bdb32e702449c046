"""`art auto` from a sentence to a report: a generator and a judge over HTTP, a tiny model, real training."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import art
from art.cli.main import main
from art.metrics.scores import Estimate
from art.rewards import judge_client
from art.tasks.yes_no_maybe import REWARDS, parse_answer
from art.testing.judge import ScriptedJudge
from art_recipes.scenarios import Dataset
from art_recipes.scripted_generator import ScriptedGenerator
from tests.support.shared_server import on

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing litellm waits for a download

SENTENCE = "Answer yes, no or maybe to whatever is asked"
INPUTS = [
    f"{ask} {word}" for ask in ("say", "just say", "reply with", "answer") for word in ("yes", "no", "it", "a word")
]
MIN_CHANGE = 0.15
"""Of the judged score on held-out inputs, where 0.95 is the most and the tiny model begins at about 0.6."""


def maybe_is_best(trajectory: dict[str, Any]) -> float:
    return 0.1 + 0.8 * REWARDS.get(parse_answer(trajectory["messages"][-1]["content"]), 0.0)


def test_from_a_sentence_to_a_report_by_way_of_edited_files(
    tiny_model: Path, shared_backend: art.LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("art_recipes.autorl.LocalBackend", on(shared_backend))
    monkeypatch.setattr(judge_client, "_has_litellm", lambda: False)  # importing it takes seconds
    with ScriptedGenerator(inputs=INPUTS) as generator, ScriptedJudge(maybe_is_best, noise=0.1) as judge:
        servers = ["--generator", "openai/g", "--generator-url", generator.base_url, "--judge", "openai/j",
                   "--judge-url", judge.base_url]  # fmt: skip
        assert main(["auto", SENTENCE, "--out", "maybe", "--write-only", "--num-scenarios", "10", *servers]) == 0
        written = len(generator.requests)
        lines = (tmp_path / "maybe" / "scenarios.jsonl").read_text().splitlines()
        mine = ['{"input": "say maybe", "split": "test"}', '{"input": "say <b>no</b>", "split": "test"}']
        (tmp_path / "maybe" / "scenarios.jsonl").write_text(
            "\n".join([*lines[:6], '{"input": "answer maybe", "split": "val"}', *mine])
        )
        task = (tmp_path / "maybe" / "task.toml").read_text()
        task = task.replace("Do the job.", "Say what you like.").replace("tokens = 1024", "tokens = 8")
        (tmp_path / "maybe" / "task.toml").write_text(task)
        loop = [
            "--steps",
            "1",
            "--groups",
            "2",
            "--rollouts",
            "4",
            "--learning-rate",
            "5e-3",
            "--held-out-rollouts",
            "2",
        ]
        assert main(["auto", "maybe", "--model", str(tiny_model), *loop, *servers]) == 0
        assert len(generator.requests) == written, "what was written is used, not written anew"
    num_tests = len(Dataset.load(tmp_path / "maybe").split("test"))
    judged = [str(request["messages"]) for request in judge.requests]
    num_val = len(Dataset.load(tmp_path / "maybe").split("val"))
    assert num_val > 0
    assert len(judged) <= 2 + num_tests + num_val
    assert all("Say what you like." in text for text in judged)
    together = [text for text in judged if "say maybe" in text]
    assert len(together) == 1, "the answers from before and after are one question"
    report = json.loads((tmp_path / "maybe" / "report.json").read_text())
    assert report["headline"]["before"]["count"] == num_tests
    assert {row["scenario"] for row in report["comparisons"]} >= {"say maybe", "say <b>no</b>"}
    page = (tmp_path / "maybe" / "report.html").read_text()
    assert "say &lt;b&gt;no&lt;/b&gt;" in page
    assert report["command"].startswith("art auto maybe --model ")
    assert "generator" in report["costs"]
    assert "change " in capsys.readouterr().out


# -- learning --


def load_example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "autorl" / "desk.py"
    spec = importlib.util.spec_from_file_location("desk", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["desk"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_desk_is_learnt_from_a_sentence(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    desk = load_example()
    assert main(["tiny-model", "tiny", "--task", "desk:Desk", "--seed", str(seed)]) == 0
    with desk.scripted_generator() as generator, desk.scripted_judge(seed=seed) as judge:
        command = [
            "auto", desk.DESCRIPTION, "--model", "tiny", "--out", "desk", "--num-scenarios", "100",
            "--groups", "16", "--learning-rate", "3e-3", "--seed", str(seed), "--held-out-rollouts", "4",
            "--generator", "openai/g", "--generator-url", generator.base_url,
            "--judge", "openai/j", "--judge-url", judge.base_url,
        ]  # fmt: skip
        assert main([*command, "--steps", "15"]) == 0
        requests = len(generator.requests)
        assert main([*command, "--steps", "25"]) == 0
        assert len(generator.requests) == requests
    assert "auto/desk is at step 15 of 25" in capsys.readouterr().out
    change = Estimate(**json.loads((tmp_path / "desk" / "report.json").read_text())["headline"]["change"])
    assert change.low > 0
    assert change.mean >= MIN_CHANGE
