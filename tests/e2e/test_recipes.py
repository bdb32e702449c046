"""Recipes as a notebook calls them: awaited in an event loop that runs already, without the command line."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError
from art.recipes import AutoConfig, Progress
from art.rewards import judge_client
from art.tasks.yes_no_maybe import REWARDS, parse_answer
from art.testing.judge import ScriptedJudge
from art_recipes.scripted_generator import ScriptedGenerator
from tests.support.shared_server import on

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing litellm waits for a download

SENTENCE = "Answer yes, no or maybe to whatever is asked"
INPUTS = [f"{ask} {word}" for ask in ("say", "just say", "reply with") for word in ("yes", "no", "it", "a word")]


def maybe_is_best(trajectory: dict[str, Any]) -> float:
    return 0.1 + 0.8 * REWARDS.get(parse_answer(trajectory["messages"][-1]["content"]), 0.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judge_client, "_has_litellm", lambda: False)  # importing it takes seconds


@pytest.fixture
def models() -> Iterator[dict[str, Any]]:
    """Settings that name a generator and a judge."""
    with ScriptedGenerator(inputs=INPUTS) as generator, ScriptedJudge(maybe_is_best, noise=0.1) as judge:
        yield {
            "generator": "openai/g", "generator_url": generator.base_url, "judge": "openai/j",
            "judge_url": judge.base_url,
        }  # fmt: skip


@pytest.mark.slow
async def test_auto(
    tiny_model: Path, tmp_path: Path, models: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Progress] = []
    small = {"steps": 1, "groups": 2, "rollouts": 4, "num_scenarios": 10, "learning_rate": 5e-3, "held_out_rollouts": 1}
    result = await art.recipes.auto(SENTENCE, str(tiny_model), out="maybe", on_progress=lines.append, **small, **models)
    assert (result.step, result.is_untrained, result.is_over_budget) == (1, False, False)
    assert result.headline is not None
    assert result.verdict is not None
    assert result.report_path == tmp_path / "maybe" / "report.html"
    report = json.loads(result.report_path.with_suffix(".json").read_text())
    assert report["headline"]["change"]["mean"] == result.headline.change.mean
    said = [str(line) for line in lines]
    assert any(line.startswith("step    1/1  reward") for line in said)
    assert f"{result.verdict.what}." in said
    again = await art.recipes.auto("maybe", str(tiny_model), **small, **models)
    assert (again.step, again.reports, again.headline) == (1, [], result.headline), "what is done is not done twice"
    assert capsys.readouterr().out == "", "recipes print nothing"


async def test_write_task_then_settings_as_an_object(
    models: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "art_recipes")
    dataset = await art.recipes.write_task(SENTENCE, config=AutoConfig(num_scenarios=8, **models), out="maybe")
    assert len(dataset.scenarios) == 8
    assert "8 scenarios: " in caplog.text, "without on_progress the lines are logged"
    assert (tmp_path / "maybe" / "task.toml").exists()
    with pytest.raises(ConfigError, match="say what to train"):
        await art.recipes.auto("maybe")
    with pytest.raises(ConfigError, match="the base model is given twice"):
        await art.recipes.auto("maybe", "./tiny", base_model="./other")
    with pytest.raises(ConfigError, match="AutoConfig: `stepz` is no setting of AutoConfig"):
        await art.recipes.auto("maybe", "./tiny", stepz=3)


async def test_train(
    tiny_model: Path, shared_backend: art.LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = on(shared_backend)
    monkeypatch.setattr("art_recipes.training.task_training.LocalBackend", opened)
    result = await art.recipes.train("yes_no_maybe", str(tiny_model), steps=1, groups=2, rollouts=4, held_out=4)
    assert result.step == 1
    assert result.before is not None
    assert result.after is not None
    assert result.change is not None
    assert result.change.mean == pytest.approx(result.after.mean - result.before.mean)
    assert opened.asked_for == [tmp_path / ".art"]
    models = shared_backend.path / "yes_no_maybe" / "models"
    assert (models / "yes_no_maybe-seed0" / "checkpoints" / "0001").exists()

    said: list[str] = []
    again = await art.recipes.train(
        "yes_no_maybe", str(tiny_model), steps=2, groups=2, rollouts=4, held_out=4,
        on_progress=lambda line: said.append(str(line)),
    )  # fmt: skip
    assert any(line.endswith(" is at step 1 of 2") for line in said)
    assert any(line.startswith("step    2/2  reward") for line in said)
    assert again.before is not None, "it is in the log of the run before"
    assert (again.before.mean, again.before.interval) == (result.before.mean, result.before.interval)
    assert again.change is not None
    assert again.verdict is not None
    assert "on held-out rollouts" in again.verdict.what
    measured = await art.recipes.train("yes_no_maybe", str(tiny_model), name="new", steps=0, held_out=4)
    assert (measured.step, measured.reports, measured.after) == (0, [], None)
    assert measured.before is not None
