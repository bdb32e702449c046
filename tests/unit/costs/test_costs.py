"""The ledger: sums, sources, what survives a crash, and what stops at a budget."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import art
from art.cli.main import main
from art.costs import Amount, Ledger, Prices, TokenPrice
from art.errors import BudgetError, ConfigError
from art.protocol.training import TokenCounts
from art.recipes import TaskTrainingConfig
from art.rewards import JudgeSettings
from art.rewards.judge_client import JudgeClient
from art.storage.jsonl import read_lines
from art.trajectory import Trajectory, TrajectoryGroup
from art_recipes.arguments import add_recipe_options, config_of
from tests.support.fake_art_server import FakeArtServer, refusal
from tests.support.model_folder import paths_of


def test_a_row_has_every_sum() -> None:
    ledger = Ledger()
    ledger.book("judge/ruler", usd=0.1, prompt_tokens=90, completion_tokens=8)
    ledger.book("judge/grade", usd=0.2)
    ledger.book("gpu/trainer", usd=0.4, seconds=3.0)
    first = ledger.close("train", 1)
    assert first == pytest.approx(
        {
            "costs/train/judge/ruler": 0.1, "costs/train/judge/grade": 0.2, "costs/train/judge": 0.3,
            "costs/train": 0.3, "costs/gpu/trainer": 0.4, "costs/gpu": 0.4, "costs/all": 0.7,
            "data/step_tokens/train/judge/ruler/prompt": 90, "data/step_tokens/train/judge/ruler/completion": 8,
            "time/step_s/gpu/trainer": 3.0,
            "costs/cum/train/judge/ruler": 0.1, "costs/cum/train/judge/grade": 0.2, "costs/cum/train/judge": 0.3,
            "costs/cum/train": 0.3, "costs/cum/gpu/trainer": 0.4, "costs/cum/gpu": 0.4, "costs/cum/all": 0.7,
            "data/cum/tokens/train/judge/ruler/prompt": 90, "data/cum/tokens/train/judge/ruler/completion": 8,
            "time/cum/s/gpu/trainer": 3.0,
        }
    )  # fmt: skip
    ledger.book("judge/ruler", usd=1.0)
    second = ledger.close("val", 1)
    assert second["costs/eval/judge/ruler"] == second["costs/all"] == 1.0
    assert second["costs/cum/train/judge"] == pytest.approx(0.3)
    assert second["costs/cum/all"] == pytest.approx(1.7)


def test_nothing_is_forgotten_and_nothing_counts_twice(tmp_path: Path) -> None:
    path = tmp_path / "m" / "costs.jsonl"
    first = Ledger(path=path)
    first.book("judge/ruler", usd=1.0)
    first.close("train", 1)
    first.book("judge/ruler", usd=0.25)  # and then the process is killed, in the middle of its next line
    with path.open("a") as file:
        file.write('{"source": "judge/ru')
    second = Ledger(path=path)
    assert second.spent_usd == 1.25
    second.book("judge/ruler", usd=0.5)
    row = second.close("train", 2)
    assert row["costs/train/judge/ruler"] == 0.75
    assert row["costs/cum/all"] == 1.75
    assert Ledger(path=path).totals() == {"train/judge/ruler": Amount(usd=1.75, priced=3)}


def test_two_processes_share_a_ledger(tmp_path: Path) -> None:
    one, other = Ledger(path=tmp_path / "costs.jsonl"), Ledger(max_usd=1.0, path=tmp_path / "costs.jsonl")
    one.book_counters([100, 20, 30], lambda *tokens: None)
    other.book_counters([100, 20, 30], lambda *tokens: None)  # the same tokens, seen by both
    assert other.totals() == {"policy": Amount(prompt_tokens=100, cached_tokens=20, completion_tokens=30)}
    one.book("judge/ruler", usd=1.5)
    with pytest.raises(BudgetError, match=r"budget is 1\.0000 USD, and 1\.5000 USD are spent: judge/ruler 1\.5000"):
        other.check()


def test_counters_of_another_server_begin_anew() -> None:
    ledger = Ledger()
    price = TokenPrice(prompt=4, cached=1, completion=10)

    def usd(prompt: int, cached: int, completion: int) -> float:
        return price.usd(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)

    ledger.book_counters([2_000_000, 1_000_000, 100_000], usd)
    assert ledger.spent_usd == pytest.approx(4 + 1 + 1)
    ledger.book_counters([500_000, 0, 0], usd)
    assert ledger.totals()["policy"].prompt_tokens == 2_500_000
    assert ledger.spent_usd == pytest.approx(8)


@pytest.mark.parametrize("source", ["", "judge//ruler", "cum/judge", "all", "a b"])
def test_what_is_no_source(source: str) -> None:
    with pytest.raises(ConfigError, match="a source of costs is a path"):
        Ledger().book(source, usd=1)


def test_wrong_numbers() -> None:
    with pytest.raises(ConfigError, match="finite"):
        Ledger().book("judge/ruler", usd=float("nan"))
    with pytest.raises(ConfigError, match="0 USD or more"):
        Ledger(max_usd=-1)


def test_the_report_says_what_has_no_known_price(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(max_usd=2)
    ledger.book("judge/ruler", prompt_tokens=1200, completion_tokens=80)
    ledger.book("generator", usd=0.5)
    ledger.book("policy", priced=False, prompt_tokens=7)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "price of judge/ruler is not known" in caplog.text
    generator, judge, policy, total = ledger.lines()
    assert generator.split() == ["generator", "0.5000", "USD"]
    assert "1,200 prompt, 80 completion tokens" in judge
    assert "the price of 1 requests is not known; litellm, which knows prices, is not installed" in judge
    assert "no price" in policy
    assert total.split() == ["in", "all", "0.5000", "of", "2.0000", "USD"]
    assert ledger.summary()["by_source"]["generator"] == {"usd": 0.5, "priced": 1}


def test_what_has_no_price_is_not_shown_as_free() -> None:
    ledger = Ledger()
    ledger.book("judge/ruler", prompt_tokens=1200, priced=False)
    ledger.book("gpu/trainer", seconds=3.0, priced=False)
    *sources, total = ledger.lines()
    assert all("no price" in line and "USD" not in line for line in (*sources, total)), [*sources, total]
    ledger.book("judge/ruler", usd=0.0)
    assert ledger.lines()[-1].split() == ["in", "all", "0.0000", "USD"]


# --- of judges ---


def test_cached_tokens_of_an_answer_are_counted_and_a_price_that_nobody_told_is_not_known() -> None:
    model: Any = art.Model(name="j", project="p", inference_base_url="https://api.test/v1", inference_api_key="k")
    details = SimpleNamespace(cached_tokens=300)
    usage = SimpleNamespace(prompt_tokens=1000, completion_tokens=200, prompt_tokens_details=details)
    choice = SimpleNamespace(message=SimpleNamespace(content="hi"))
    answer = JudgeClient(model, {}, JudgeSettings())._read(SimpleNamespace(usage=usage, choices=[choice]), 1.0)
    assert (answer.cost_usd, answer.cached_tokens) == (None, 300)


# --- in commands ---


def test_status_shows_what_models_have_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--data-dir", str(tmp_path)]) == 1
    ledger = Ledger(path=tmp_path / "shop" / "models" / "agent" / "costs.jsonl")
    ledger.book("judge/ruler", usd=1.5, prompt_tokens=10)
    ledger.close("train", 1)
    capsys.readouterr()
    assert main(["status", "--data-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("no art-server has ever run on")
    assert shown[2:] == [
        "Costs of shop/agent",
        "  train/judge/ruler                1.5000 USD  10 prompt tokens",
        "  in all                           1.5000 USD",
    ]


def options(*arguments: str) -> TaskTrainingConfig:
    parser = argparse.ArgumentParser()
    add_recipe_options(parser, TaskTrainingConfig, "")
    return config_of(TaskTrainingConfig, parser.parse_args(arguments))


def test_prices_of_the_command_line() -> None:
    config = options("--budget", "5", "--price-per-hour", "2", "--judge-price", "4", "8")
    assert config.prices() == Prices(device_usd_per_hour=2)
    ledger = Ledger()
    settings = config.judge_settings(JudgeSettings(), ledger)
    assert settings.budget is ledger
    assert (settings.prompt_usd_per_million, settings.completion_usd_per_million) == (4, 8)
    assert options().prices() == Prices()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "5"], "--budget needs something that costs"),
        (["--budget", "-5", "--judge", "openai/o3"], "`--budget` must be greater than or equal to 0"),
        (["--judge-price", "1", "-1"], "0 USD or more"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*arguments).prices()


# --- on a model ---


@pytest.fixture
def server() -> FakeArtServer:
    return FakeArtServer()


@pytest.fixture
def make_model(server: FakeArtServer, tmp_path: Path) -> Any:
    async def make(**fields: Any) -> art.TrainableModel:
        backend = art.Backend()
        backend._client = server.client()
        model = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path), **fields)
        await model.register(backend)
        return model

    return make


def count(server: FakeArtServer, **tokens: int) -> None:
    server.models["p/m"] = server.models["p/m"].model_copy(update={"tokens": TokenCounts(**tokens)})


def rows(model: art.TrainableModel) -> list[dict[str, Any]]:
    return [row for _, row in read_lines(paths_of(model).history) if row]


def judged(**costs: float) -> TrajectoryGroup:
    metrics = {f"costs/{name.replace('_', '/')}": usd for name, usd in costs.items()}
    messages = [{"role": "user", "content": "a"}]
    return TrajectoryGroup([Trajectory(messages_and_choices=messages, metrics=metrics) for _ in range(2)])


async def test_tokens_and_device_time_of_each_step(make_model: Any, server: FakeArtServer) -> None:
    model = await make_model(
        prices=Prices(policy=TokenPrice(prompt=1, completion=10), device_usd_per_hour=3600), budget_usd=100
    )
    count(server, prompt=1_000_000, cached=400_000, completion=100_000)
    model._meter._since -= 5  # seconds ago
    await model.log([judged()], split="train", metrics={"time/step_trainer_s": 2.0}, step=1)
    row = rows(model)[0]
    assert row["costs/train/policy"] == pytest.approx(2.0)
    assert row["data/step_tokens/train/policy/cached"] == 400_000
    assert row["costs/gpu/trainer"] == pytest.approx(2.0)
    assert row["costs/gpu/rollouts"] >= 3.0, "the five seconds, less those of the trainer"
    assert row["time/step_trainer_s"] == 2.0
    # A script that goes on: the server still knows all tokens.
    again = await make_model(prices=model.prices)
    count(server, prompt=1_500_000, cached=400_000, completion=100_000)
    await again.log([judged()], split="val", step=1)
    row = rows(again)[1]
    assert row["costs/eval/policy"] == pytest.approx(0.5)
    assert row["costs/cum/train/policy"] == pytest.approx(2.0)
    assert row["costs/cum/all"] == pytest.approx(row["costs/all"] + rows(model)[0]["costs/all"])


async def test_costs_of_trajectories_count_unless_their_source_books_itself(make_model: Any) -> None:
    model = await make_model()
    await model.log([judged(judge_ruler=0.25, search=1.0)], split="train", step=1)
    assert rows(model)[0]["costs/train/judge/ruler"] == 0.5
    assert rows(model)[0]["costs/train/search"] == 2.0
    model.costs.book("judge/ruler", usd=0.75)  # as a judge does whose settings hold this ledger: a group failed
    await model.log([judged(judge_ruler=0.25, search=1.0)], split="train", metrics={"costs/train/api": 3.0}, step=2)
    assert rows(model)[1]["costs/train/judge/ruler"] == 0.75
    assert rows(model)[1]["costs/train/api"] == 3.0
    assert rows(model)[1]["costs/cum/train"] == pytest.approx(0.5 + 2 + 0.75 + 2 + 3)


async def test_the_budget_of_a_model(make_model: Any, tmp_path: Path) -> None:
    model = await make_model(budget_usd=1.0)
    model.costs.check()
    model.costs.book("generator", usd=1.0)
    with pytest.raises(BudgetError, match=r"generator 1\.0000"):
        model.costs.check()
    model.budget_usd = 2.0
    model.costs.check()
    lines = [json.loads(line) for line in (tmp_path / "p/models/m/costs.jsonl").read_text().splitlines()]
    assert lines[0]["source"] == "generator"
    copy = model.model_copy(update={"name": "other"})
    assert copy.costs.spent_usd == 0


async def test_a_server_that_cannot_be_asked_is_asked_later(
    make_model: Any, server: FakeArtServer, caplog: Any
) -> None:
    model = await make_model()
    count(server, prompt=10)
    server.trouble = [lambda request: refusal(404, "not_found")]
    await model.log(split="train", metrics={"loss/train": 1.0}, step=1)
    assert "booked later" in caplog.text
    await model.log(split="train", metrics={"loss/train": 1.0}, step=2)
    assert rows(model)[1]["data/step_tokens/train/policy/prompt"] == 10
