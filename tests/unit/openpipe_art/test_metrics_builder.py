"""`model.metrics_builder()`, `track_api_cost`, and sums over the rows of a history."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import art
from art.errors import ConfigError
from art.metrics import MetricsBuilder, track_api_cost
from tests.support.model_folder import paths_of


@pytest.fixture
def model(tmp_path: Path) -> art.Model:
    return art.Model(name="agent", project="games", base_path=str(tmp_path))


def rows(model: art.Model) -> list[dict[str, Any]]:
    return [json.loads(line) for line in paths_of(model).history.read_text().splitlines()]


async def test_metrics_wait_for_the_next_row(model: art.Model) -> None:
    builder = model.metrics_builder("train")
    builder.add_user_timing(step_wall_s=2.0, step_actor_s=1.0)
    builder.add_user_timing(step_actor_s=0.5)
    builder.add_idle_times(step_actor_idle_s=0.25)
    builder.add_data(step_num_scenarios=4)
    builder.add_metric("train/temperature", 1.0)
    model.metrics_builder("train").add_metric("train/temperature", 0.5)
    builder.for_cost_context("eval").add_metric("val/temperature", 0.7)
    model.metrics_builder().add_metric("train/any", 1.0)
    with builder.measure("time/step_tools_s"):
        await asyncio.sleep(0.01)
    await model.log(split="train", step=1, metrics={"data/step_games": 3})
    await model.log(
        split="train", step=2, metrics={"data/step_games": 4, "time/step_actor_s": 2.0, "data/step_x_share": 1}
    )
    first, second = rows(model)
    assert (first["time/step_wall_s"], first["time/step_actor_s"], first["train/temperature"]) == (2.0, 1.5, 0.5)
    assert (first["throughput/step_actor_idle_s"], first["data/step_num_scenarios"]) == (0.25, 4)
    assert first["time/step_tools_s"] >= 0.01
    assert (first["train/any"], "val/temperature" in first) == (1.0, False)
    assert not {"train/temperature", "train/any", "val/temperature"} & second.keys()
    await model.log(split="val", step=2)
    assert rows(model)[2]["val/temperature"] == 0.7
    assert (first["data/cum/games"], second["data/cum/games"]) == (3, 7)
    assert (first["time/cum/actor_s"], second["time/cum/actor_s"]) == (1.5, 3.5)
    assert "time/cum/tools_s" not in second
    assert "data/cum/x_share" not in second


async def test_sums_go_on_after_a_restart_and_count_concurrent_rows(model: art.Model) -> None:
    await asyncio.gather(*(model.log(step=1, split="train", metrics={"data/step_games": 1}) for _ in range(8)))
    again = art.Model(name="agent", project="games", base_path=model.base_path)
    await again.log(step=2, split="train", metrics={"data/step_games": 2})
    await again.log(step=2, split="other", metrics={"data/step_games": 2})
    assert sorted(row.get("data/cum/games", 0) for row in rows(model)) == [0, *range(1, 9), 10]


async def test_mean_speeds_over_all_rows(model: art.Model) -> None:
    builder = model.metrics_builder()
    for step, tokens in ((1, 100), (2, 500)):
        builder.add_data(step_actor_tokens=tokens)
        builder.add_user_timing(step_actor_s=2.0)
        await model.log(split="train", step=step, metrics={"data/step_trainer_tokens": 10, "time/step_trainer_s": 0})
    assert [row["throughput/avg_actor_tok_per_s"] for row in rows(model)] == [50, 150]
    assert "throughput/avg_trainer_tok_per_s" not in rows(model)[0], "no time has passed"


async def test_tokens_that_anthropic_reads_from_its_cache_or_writes_to_it(model: art.Model) -> None:
    usage = {
        "input_tokens": 1_000_000, "cache_read_input_tokens": 2_000_000, "cache_creation_input_tokens": 3_000_000,
        "output_tokens": 1_000_000,
    }  # fmt: skip
    prices = {"prompt_price_per_million": 4.0, "completion_price_per_million": 8.0}
    builder = model.metrics_builder()
    ask = {"provider": "anthropic", "model_name": "m", **prices}
    assert builder.add_response_cost("judge", {"usage": usage}, **ask) == pytest.approx(6 * 4 + 8)
    further = {"cache_read_price_per_million": 0.5, "cache_creation_price_per_million": 5.0}
    usd = builder.add_response_cost("judge", {"usage": usage}, **ask, **further)
    assert usd == pytest.approx(1 * 4 + 2 * 0.5 + 3 * 5 + 8)


async def test_wrong_names_are_refused(model: art.Model) -> None:
    builder = model.metrics_builder()
    for key in ("a", "/a", "data/cum/a"):
        with pytest.raises(ConfigError, match="section/name"):
            builder.add_metric(key, 1.0)
    with pytest.raises(ConfigError, match="cost context"):
        model.metrics_builder("a/b")


ANSWER = SimpleNamespace(usage={"prompt_tokens": 1_000_000, "completion_tokens": 500_000})


async def test_costs_of_an_api(model: art.Model) -> None:
    @track_api_cost(
        source="judge/check",
        provider="openai",
        model_name="o3",
        prompt_price_per_million=2,
        completion_price_per_million=8,
    )
    async def judge() -> Any:
        return ANSWER

    @track_api_cost(source="search", provider="somebody", model_name="x", response_getter=lambda pair: pair[0])
    def search() -> Any:
        return {"usage": {"cost": 0.25, "input_tokens": 7}}, "text"

    assert await judge() is ANSWER  # nobody books: no builder is active
    assert model.costs.totals() == {}
    with model.metrics_builder("train").activate_context():
        await judge()
        search()
    token = model.activate_metrics_context("eval")
    await judge()
    token.var.reset(token)
    model.metrics_builder().add_cost("train/rent", 1.0)
    await model.log(split="train", step=1)
    row = rows(model)[0]
    assert (row["costs/train/judge/check"], row["costs/eval/judge/check"], row["costs/train/search"]) == (6, 6, 0.25)
    assert (row["costs/train/rent"], row["costs/all"]) == (1.0, 13.25)
    await model.log(split="train", step=2)
    assert rows(model)[1]["costs/cum/all"] == 13.25


def test_prices_that_are_registered_and_prices_that_nobody_knows(model: art.Model) -> None:
    builder = model.metrics_builder("train")
    with pytest.raises(ConfigError, match="price of openai/new-model is not known"):
        builder.add_response_cost("llm", ANSWER, provider="openai", model_name="new-model")
    MetricsBuilder.register_model_pricing("new-model", prompt_per_million=1, completion_per_million=2)
    try:
        assert builder.add_response_cost("llm", ANSWER, provider="openai", model_name="new-model") == 2.0
        MetricsBuilder.register_model_pricing(
            "claude", prompt_per_million=1, completion_per_million=2, cache_read_per_million=0.5,
            cache_creation_per_million=3,
        )  # fmt: skip
        usage = {"input_tokens": 10**6, "cache_read_input_tokens": 10**6, "cache_creation_input_tokens": 10**6}
        ask = {"provider": "anthropic", "model_name": "claude"}
        assert builder.add_response_cost("llm/", {"usage": usage}, **ask) == 1 + 0.5 + 3
        assert builder.add_response_cost("llm", {"usage": usage}, **ask, prompt_price_per_million=2) == 2 + 0.5 + 3
        with pytest.raises(ConfigError, match="has no `usage`"):  # a stream: 0 USD would be wrong
            builder.add_response_cost("llm", iter(()), **ask)
    finally:
        for name in ("new-model", "claude"):
            MetricsBuilder._prices.pop(name, None)
    assert model.costs.spent_usd == 2 + 4.5 + 5.5


@pytest.mark.parametrize(
    ("provider", "name", "usd"),
    [("openai", "openai/gpt-4.1", 10.0), ("openai", "gpt-4.1", 10.0), ("anthropic", "claude-sonnet-4-6", 18.0)],
)
async def test_two_prices_are_known_without_litellm(model: art.Model, provider: str, name: str, usd: float) -> None:
    @track_api_cost(source="judge", provider=provider, model_name=name)
    async def judge() -> Any:
        return SimpleNamespace(usage={"prompt_tokens": 1_000_000, "completion_tokens": 1_000_000})

    with model.metrics_builder().activate_context():
        await judge()
    assert model.costs.totals()["train/judge"].usd == pytest.approx(usd)


async def test_an_unknown_price_never_costs_the_judges_answer(
    model: art.Model, caplog: pytest.LogCaptureFixture
) -> None:
    @track_api_cost(source="judge", provider="acme", model_name="acme/oracle")
    def judge() -> Any:
        return {"answer": 42, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}

    with model.metrics_builder().activate_context():
        assert judge()["answer"] == 42
        assert judge()["answer"] == 42
    assert not model.costs.totals()
    warnings = [record.message for record in caplog.records if "not booked" in record.message]
    assert len(warnings) == 1
    assert "the price of acme/oracle is not known" in warnings[0]


async def test_the_config_of_trackers(model: art.Model) -> None:
    model.update_wandb_config({"seed": 3})
    model.update_wandb_config({"seed": 3, "family": "x"})
    assert model._run_config() | {"seed": 3, "family": "x"} == model._run_config()


async def test_a_row_of_groups_counts_those_with_something_to_learn(model: art.Model) -> None:
    groups = [art.TrajectoryGroup([art.Trajectory(reward=r) for r in rewards]) for rewards in ((0, 1), (1, 1), (1,))]
    await model.log(groups, split="train", step=1)
    assert rows(model)[0]["data/step_num_groups_trainable"] == 1
