"""`compare_models`: the same scenarios and random numbers for all, prices, and rollouts that are not made again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from art.costs import Prices, TokenPrice
from art.errors import ConfigError
from art.model import Model
from art.recipes import CompareConfig, Endpoint, compare_models
from art.task import get_task
from art.testing.scripted_model import ScriptedModel
from art.testing.scripted_server import ScriptedServer, completion
from art.trajectory import Trajectory
from art_recipes.comparing.model_comparison import ModelComparison, cells, read_comparison, remarks
from art_recipes.comparing.run_model import KeptRollout, price_rollouts
from tests.support.parity import Parity, Server
from tests.support.scripted_chat import ScriptedChat, answer
from tools.pages.tasks import ready_tasks


def test_this_machine_is_paid_for_the_time_in_which_any_rollout_ran() -> None:
    now = 1_795_000_000.0  # as a Unix time today; float numbers around it are 0.24 microseconds apart
    times = [(now, 0.1), (now + 0.05, 0.1), (now + 10, 0.001)]
    rows = [
        KeptRollout(scenario="s", index=i, started_at=start, seconds=seconds, reward=1.0, headline=1.0)
        for i, (start, seconds) in enumerate(times)
    ]
    usd, _ = price_rollouts(rows, None, Prices(device_usd_per_hour=3600.0))
    assert usd == pytest.approx(1000 * 0.151 / 3, rel=2e-6)  # a start is known to 0.24 microseconds
    alone, _ = price_rollouts(rows[2:], None, Prices(device_usd_per_hour=3600.0))
    assert alone == pytest.approx(1.0, rel=1e-12)


def config(tmp_path: Path, **settings: Any) -> CompareConfig:
    return CompareConfig(**{"held_out": 10, "attempts": 1, "data_dir": tmp_path, **settings})


def folder(tmp_path: Path) -> Path:
    return tmp_path / "comparisons" / "parity-test-seed0"


async def test_models_get_the_same_scenarios_with_the_same_random_numbers(tmp_path: Path) -> None:
    good, weak = Server(), Server(skill=0.6)
    with ScriptedServer(good) as a, ScriptedServer(weak) as b:
        models = [f"good={a.base_url}", f"weak={b.base_url}"]
        comparison = await compare_models(Parity(), models, config=config(tmp_path, rollouts=2))
    first, second = (
        sorted((body["seed"], body["messages"][-1]["content"]) for body in server.bodies) for server in (good, weak)
    )
    assert first == second
    assert len({seed for seed, _ in first}) == 40  # 10 scenarios, 2 rollouts, 2 turns
    row = comparison.row("weak")
    assert row.difference is not None
    assert row.headline is not None
    assert row.difference.mean == pytest.approx(row.headline.mean - 1.0)
    assert (row.difference.num, row.headline.num, row.turns, row.num_rollouts) == (10, 10, 2.0, 20)


async def test_the_result_is_in_the_folder_as_json(tmp_path: Path) -> None:
    seen: list[ModelComparison] = []
    with ScriptedServer(Server()) as server:
        models = [f"good={server.base_url}"]
        comparison = await compare_models(Parity(), models, config=config(tmp_path), on_update=seen.append)
    assert read_comparison(folder(tmp_path)) == comparison == seen[-1]
    assert comparison.model_dump()["version"] == 1
    kept = next((folder(tmp_path) / "rollouts").iterdir()).read_text()
    assert '"content": "even"' in kept


async def test_prices_come_from_the_user_the_provider_or_are_not_known(tmp_path: Path) -> None:
    def with_cost(_: int, body: dict[str, Any]) -> Any:
        status, content = completion(body, {"content": "even"})
        content["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "cost": 0.001}
        return status, content

    def without_usage(_: int, body: dict[str, Any]) -> Any:
        status, content = completion(body, {"content": "even"})
        return status, {key: value for key, value in content.items() if key != "usage"}

    price = TokenPrice(prompt=2.0, completion=20.0)
    with ScriptedServer(Server(with_cost)) as a, ScriptedServer(Server(without_usage)) as b:
        models = [
            Endpoint(label="given", url=a.base_url, model="x", price=price),
            Endpoint(label="stated", url=a.base_url, model="x"),
            Endpoint(label="silent", url=b.base_url, model="x", price=price),
            Endpoint(label="unknown", url=b.base_url, model="y"),
        ]
        comparison = await compare_models(Parity(), models, config=config(tmp_path))
        hourly = await compare_models(
            Parity(), models[3:], config=config(tmp_path, price_per_hour=3600.0, held_out=1, seed=1)
        )
    rows = {row.label: row for row in comparison.models}
    assert rows["given"].usd_per_1000 == pytest.approx(1000 * 2 * (100 * 2.0 + 10 * 20.0) / 1e6)
    assert rows["stated"].usd_per_1000 == pytest.approx(1000 * 2 * 0.001)
    assert (rows["given"].prompt_tokens, rows["given"].completion_tokens) == (200.0, 20.0)
    assert (rows["silent"].usd_per_1000, rows["silent"].prompt_tokens) == (None, None)
    assert rows["silent"].price_note == "no tokens reported for 20 of 20 answers"
    assert (rows["unknown"].usd_per_1000, rows["unknown"].price_note) == (None, "no price")
    assert "no price" in cells(comparison, rows["unknown"])
    assert any("reported no tokens for 20 of 20 answers" in remark for remark in remarks(comparison))
    row = hourly.models[0]
    assert row.rollout_latency_s is not None
    assert row.usd_per_1000 == pytest.approx(1000 * row.rollout_latency_s.median)  # USD 1 per second


async def test_rollouts_that_have_a_score_are_not_made_again(tmp_path: Path) -> None:
    server = Server()
    with ScriptedServer(server) as running:
        models = [f"good={running.base_url}"]
        await compare_models(Parity(), models, config=config(tmp_path, held_out=4))
        await compare_models(Parity(), models, config=config(tmp_path, held_out=6))
        assert len(server.bodies) == 12
        await compare_models(Parity(), models, config=config(tmp_path, held_out=4, max_tokens=99))
        assert len(server.bodies) == 20  # it was asked in another way
        assert server.bodies[-1]["max_completion_tokens"] == 99


async def test_what_was_done_before_a_cancellation_is_kept(tmp_path: Path) -> None:
    server = Server()
    with ScriptedServer(server) as running:
        models = [f"good={running.base_url}"]
        task = asyncio.create_task(
            compare_models(Parity(), models, config=config(tmp_path, held_out=200, concurrency=2))
        )
        while len(server.bodies) < 20:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        partial = read_comparison(folder(tmp_path))
        row = partial.row("good")
        assert 8 <= row.num_rollouts < 200
        assert (partial.is_complete, row.num_rollouts_left) == (False, 200 - row.num_rollouts)
        before = len(server.bodies)
        games = row.num_rollouts + 5
        again = await compare_models(Parity(), models, config=config(tmp_path, held_out=games))
    assert again.is_complete
    assert again.row("good").num_rollouts == games
    assert len(server.bodies) - before <= 2 * 7  # at most two rollouts were under way, and two may have been further


async def test_a_failed_rollout_is_tried_again_and_its_calls_stay_counted(tmp_path: Path) -> None:
    from art.testing.scripted_server import failure

    server = Server(lambda number, _: failure(500, "boom") if number < 2 else None)
    with ScriptedServer(server) as running:
        models = [f"m={running.base_url}"]
        first = await compare_models(Parity(), models, config=config(tmp_path, held_out=2, concurrency=1))
        second = await compare_models(Parity(), models, config=config(tmp_path, held_out=2, concurrency=1))
    assert (first.row("m").num_failed_rollouts, second.row("m").num_failed_rollouts) == (2, 0)
    calls = second.row("m").calls
    assert calls is not None
    assert (calls.num_failed, calls.num_answered) == (2, 4)


async def test_other_rules_of_the_task_are_another_scenario(tmp_path: Path) -> None:
    class Other(Parity):
        def scenarios(self, split: Any, *, seed: int, count: int) -> Any:
            return [self.scenario(split, seed, index, {"number": 50 + index}) for index in range(count)]

    server = Server()
    with ScriptedServer(server) as running:
        for task in (Parity(), Other()):
            await compare_models(task, [f"good={running.base_url}"], config=config(tmp_path, held_out=3))
    assert len(server.bodies) == 12


async def test_parameters_of_requests_can_be_changed_and_left_out(tmp_path: Path) -> None:
    server = Server()
    with ScriptedServer(server) as running:
        params = {"reasoning_effort": "low", "temperature": 0.2, "seed": None}
        model = Endpoint(label="m", url=running.base_url, model="x", params=params, max_tokens=500)
        await compare_models(Parity(), [model], config=config(tmp_path, held_out=1))
    body = server.bodies[0]
    assert (body["reasoning_effort"], body["temperature"], body["max_completion_tokens"]) == ("low", 0.2, 500)
    assert "seed" not in body
    assert body["model"] == "x"


async def test_a_model_object_with_an_address_is_measured_too(tmp_path: Path) -> None:
    with ScriptedServer(Server()) as running:
        own = Model(
            name="own", project="p", inference_base_url=running.base_url, inference_api_key="k",
            inference_model_name="x",
        )  # fmt: skip
        comparison = await compare_models(Parity(), [own], config=config(tmp_path, held_out=2))
    row = comparison.row("own")
    assert row.calls is not None
    assert (row.num_rollouts, row.calls.num_answered, row.kind) == (2, 4, "endpoint")


async def test_models_of_one_address_share_its_rollouts_at_once(tmp_path: Path) -> None:
    running_now, most = 0, 0

    def count(_: int, body: dict[str, Any]) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        import time

        time.sleep(0.01)
        running_now -= 1

    with ScriptedServer(Server(count)) as running:
        models = [Endpoint(label=f"m{i}", url=running.base_url, model="x") for i in range(3)]
        await compare_models(Parity(), models, config=config(tmp_path, held_out=5, concurrency=2))
    assert most <= 2


@pytest.mark.parametrize(
    ("models", "settings", "says"),
    [
        ([], {}, "at least one model"),
        (["a=http://127.0.0.1:9/v1", "a=http://127.0.0.1:9/v1"], {}, "both named 'a'"),
        (["a=http://127.0.0.1:9/v1"], {"reference": "b"}, "'b' is none of the models a"),
        (["a=http://127.0.0.1:9/v1#NO_SUCH_VARIABLE"], {}, "NO_SUCH_VARIABLE, which is not set"),
        (["nobody@3"], {}, "no model named 'nobody'"),
        (["word"], {}, "'word' is no model"),
        (["./nowhere"], {}, "no folder of a model"),
    ],
)
async def test_what_cannot_be_compared_is_said_before_anything_is_asked(
    tmp_path: Path, models: list[str], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        await compare_models(Parity(), models, config=config(tmp_path, **settings))


async def test_a_task_that_sets_no_headline_metric_is_an_error_and_no_failed_rollout(tmp_path: Path) -> None:
    class Silent(Parity):
        headline_metric = "wrong_name"

    with ScriptedServer(Server()) as running, pytest.raises(ConfigError, match="wrong_name"):
        await compare_models(Silent(), [f"good={running.base_url}"], config=config(tmp_path))


async def test_a_model_that_cannot_be_served_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with ScriptedServer(Server()) as running, pytest.MonkeyPatch.context() as patch:

        async def refuse(self: Any, model: Any) -> None:
            raise ConfigError("no such base model")

        patch.setattr("art_recipes.comparing.compare_models.TrainableModel.register", refuse)
        models = [f"good={running.base_url}", str(broken)]
        comparison = await compare_models(Parity(), models, config=config(tmp_path, held_out=3))
    row = comparison.row("model")
    assert (row.state, row.headline, row.problem) == ("gave_up", None, "no such base model")
    assert comparison.row("good").num_rollouts == 3
    assert comparison.is_complete


@pytest.mark.parametrize("way", ["blocking", "streaming"])
async def test_requests_in_threads_and_streams_are_measured_too(tmp_path: Path, way: str) -> None:
    class Other(Parity):
        async def rollout(
            self, model: Any, scenario: Any, *, rollout_index: int = 0, step: int | None = None
        ) -> Trajectory:
            request = {"model": model.get_inference_name(), "messages": [{"role": "user", "content": "10"}]}
            if way == "blocking":
                create = model.blocking_openai_client().chat.completions.create
                text = (await asyncio.to_thread(create, **request)).choices[0].message.content
            else:
                stream = await model.openai_client().chat.completions.create(stream=True, **request)
                text = "".join([chunk.choices[0].delta.content async for chunk in stream if chunk.choices])
            return Trajectory(reward=1.0, metrics={"right": float(text == "even")})

    chunks = [
        {"choices": [{"index": 0, "delta": {"content": "ev"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "en"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
    ]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    whole = completion({"messages": [], "model": "m"}, {"content": "even"})[1]
    whole["usage"] = {"prompt_tokens": 7, "completion_tokens": 2}
    whole["choices"][0]["finish_reason"] = "length"
    streamed = answer(200, events.encode(), content_type="text/event-stream")
    async with ScriptedChat(then=streamed if way == "streaming" else answer(200, whole)).running() as chat:
        comparison = await compare_models(Other(), [f"m={chat.base_url}"], config=config(tmp_path, held_out=2))
    row = comparison.row("m")
    assert row.calls is not None
    assert row.headline is not None
    assert (row.headline.mean, row.calls.num_answered) == (1.0, 2)
    if way == "streaming":  # what a stream says of its tokens is not read
        assert (row.prompt_tokens, row.calls.num_without_usage) == (None, 2)
    else:
        assert (row.prompt_tokens, row.completion_tokens, row.calls.num_cut) == (7.0, 2.0, 2)


async def test_a_task_that_only_a_judge_rewards_is_refused(tmp_path: Path) -> None:
    class Judged(Parity):
        needs_judge = True

    with pytest.raises(ConfigError, match="rewards from a judge only"):
        await compare_models(Judged(), ["a=http://127.0.0.1:9/v1"], config=config(tmp_path))


@pytest.mark.parametrize("name", [name for name, _ in ready_tasks()])
async def test_every_ready_task_can_be_compared(tmp_path: Path, name: str) -> None:
    task = get_task(name, is_tiny=True)
    comparison = await compare_models(task, [ScriptedModel(task)], config=config(tmp_path, held_out=2))
    row = comparison.row("scripted")
    assert row.headline is not None
    assert row.headline.mean > 0, "the scripted player of the task is good"
