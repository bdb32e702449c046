"""Models: names, registration, the OpenAI client, the local log, checkpoints to keep."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, ValidationError

import art
from art.backend import Backend
from art.config import LoraConfig, ModelSettings
from art.errors import (
    ConfigError,
    InvalidRequestError,
    NothingTrainableError,
    StorageError,
    TrajectoryError,
)
from art.metrics.groups import count_groups, metric_name, summarize_groups
from art.model import run_settings
from art.storage import jsonl
from art.storage.history import append_row, means_by_step
from art.storage.trajectories import read_groups
from tests.support.fake_art_server import FakeArtServer
from tests.support.model_folder import paths_of


class FakeBackend(Backend):
    def __init__(self, server: FakeArtServer, data_dir: Path | None = None) -> None:
        super().__init__()
        self._client = server.client()
        self.data_dir = data_dir


@pytest.fixture
def server() -> FakeArtServer:
    return FakeArtServer()


@pytest.fixture
async def model(server: FakeArtServer, tmp_path: Path) -> art.TrainableModel:
    model = art.TrainableModel(name="agent", project="games", base_model="base", base_path=str(tmp_path))
    await model.register(FakeBackend(server))
    return model


def group(*rewards: float, **fields: Any) -> art.TrajectoryGroup:
    answer = Choice.model_validate(
        {
            "finish_reason": "stop",
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "exchange_id": "e",
        }
    )
    items = [{"role": "user", "content": "q"}, answer]
    return art.TrajectoryGroup([art.Trajectory(messages_and_choices=items, reward=r) for r in rewards], **fields)


def history(model: art.Model) -> list[dict[str, Any]]:
    return [json.loads(line) for line in paths_of(model).history.read_text().splitlines()]


# --- construction ---


class PolicyConfig(BaseModel):
    max_turns: int = 3


def test_names_that_could_leave_the_directory() -> None:
    for name in ("../x", "a/b", "", "a b", ".hidden", "x" * 200):
        with pytest.raises(InvalidRequestError, match="`name`"):
            art.Model(name=name, project="p")
        with pytest.raises(InvalidRequestError, match="`project`"):
            art.TrainableModel(name="n", project=name, base_model="b")


def test_unknown_arguments() -> None:
    with pytest.raises(ValidationError, match="basemodel"):
        art.TrainableModel(name="n", project="p", base_model="b", basemodel="x")
    assert art.Model(name="n", project="p", report_metrics=[], entity=None)  # type: ignore[call-arg]


@pytest.mark.parametrize(("field", "value"), [("id", "i"), ("entity", "e"), ("run_id", "r")])
def test_fields_without_a_meaning_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}=.* is not supported: .*Leave it out"):
        art.TrainableModel(name="n", project="p", base_model="b", **{field: value})
    assert not hasattr(art.TrainableModel(name="n", project="p", base_model="b", **{field: None}), field)


def test_generic_in_its_config_and_copied() -> None:
    model: art.TrainableModel[PolicyConfig] = art.TrainableModel(
        name="n", project="p", base_model="b", config=PolicyConfig(max_turns=5)
    )
    assert art.TrainableModel[PolicyConfig](name="n", project="p", base_model="b", config=PolicyConfig()).config
    with pytest.raises(ValidationError):
        art.Model[PolicyConfig](name="n", project="p", config={"max_turns": "many"})
    copy = model.model_copy(deep=True)
    copy.name = "other"
    assert copy.config is not None
    copy.config.max_turns = 9
    assert model.config is not None
    assert (model.name, model.config.max_turns) == ("n", 5)
    with pytest.raises(InvalidRequestError):
        copy.name = "../x"


async def test_a_copy_of_a_registered_model(model: art.TrainableModel) -> None:
    model._internal_config = {"peft_args": {"r": 4}}
    copy = model.model_copy(deep=True)
    assert copy.backend() is model.backend()
    assert copy._internal_config == {"peft_args": {"r": 4}}
    assert copy._internal_config is not model._internal_config
    copy.name = "agent-2"
    assert copy.get_inference_name(3) == "games/agent-2@3"
    assert model.get_inference_name() == "games/agent"


def test_keys_do_not_show() -> None:
    assert "secret" not in repr(art.Model(name="n", project="p", inference_api_key="secret"))


# --- registration ---


async def test_register_tells_the_server_everything(server: FakeArtServer, tmp_path: Path) -> None:
    model = art.TrainableModel(name="agent", project="games", base_model="base")
    model._internal_config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(max_seq_length=512), peft_args=art.dev.PeftArgs(r=4)
    )
    assert model.get_inference_name() == "games/agent"
    await model.register(FakeBackend(server, data_dir=tmp_path))
    assert server.settings["games/agent"].lora == LoraConfig(rank=4)
    assert server.settings["games/agent"].engine.max_context == 512
    assert model.base_path == str(tmp_path)
    assert (model.inference_base_url, model.inference_api_key) == ("http://art.test/projects/games/v1", "key")
    assert model.get_inference_name() == "games/agent"
    assert model.get_inference_name(step=2) == "games/agent@2"
    assert model.litellm_completion_params(step=2) == {
        "model": "hosted_vllm/games/agent@2",
        "base_url": "http://art.test/projects/games/v1",
        "api_key": "key",
        "temperature": 1,
    }
    assert model.rollout_base_url("r-1") == "http://art.test/projects/games/rollouts/r-1/v1"
    with pytest.raises(InvalidRequestError):
        model.rollout_base_url("../x")


async def test_settings_the_direct_way(server: FakeArtServer) -> None:
    settings = ModelSettings(lora=LoraConfig(rank=2))
    model = art.TrainableModel(name="n", project="p", base_model="b", settings=settings)
    assert model.model_settings() == settings
    model._internal_config = {"init_args": {"max_seq_length": 1}}
    with pytest.raises(ConfigError, match="keep one"):
        await model.register(FakeBackend(server))
    assert art.TrainableModel(name="n", project="p", base_model="b", _internal_config={"peft_args": {"r": 3}})


async def test_before_registration() -> None:
    model = art.TrainableModel(name="n", project="p", base_model="b")
    for call in (model.backend, model.openai_client, lambda: model.rollout_base_url("r")):
        with pytest.raises(ConfigError, match="register"):
            call()
    with pytest.raises(ConfigError, match="register"):
        await model.get_step()
    with pytest.raises(ConfigError, match="inference_base_url"):
        art.Model(name="gpt", project="p").openai_client()


async def test_a_prompted_model(server: FakeArtServer, tmp_path: Path) -> None:
    model = art.Model(
        name="gpt", project="p", inference_model_name="gpt-x", inference_base_url="http://x/v1", inference_api_key="k"
    )
    await model.register(FakeBackend(server, data_dir=tmp_path))
    assert server.requests == []
    assert (model.get_inference_name(), await model.get_step(), model.trainable) == ("gpt-x", 0, False)
    assert model.litellm_completion_params()["model"] == "gpt-x"
    assert str(model.openai_client().base_url) == "http://x/v1/"
    with pytest.raises(ConfigError, match="not trainable"):
        model.get_inference_name(1)
    await model.log([art.Trajectory(reward=1)])
    assert history(model)[0]["val/reward"] == 1
    await model.close()


@pytest.mark.parametrize(
    "split", ["", "../val", "a/b", "my split", ".hidden", "x" * 200, None, 3, "costs", "loss", "data", "time"]
)
async def test_an_odd_split_is_refused_with_or_without_trajectories(model: art.TrainableModel, split: Any) -> None:
    for trajectories in (None, [group(0, 1)]):
        with pytest.raises(InvalidRequestError, match="split"):
            await model.log(trajectories, split=split, metrics={"x": 1.0})
    assert not paths_of(model).root.exists(), "nothing is logged"


async def never_awaited() -> list[art.TrajectoryGroup]:
    return []


def with_reward(reward: Any, **metrics: Any) -> art.Trajectory:
    trajectory = art.Trajectory()
    trajectory.reward = reward
    trajectory.metrics.update(metrics)
    return trajectory


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        (never_awaited, "`trajectories` is a coroutine that was not awaited, .*art.gather_trajectories"),
        (lambda: "abc", "`trajectories` is a str: 'abc', not a list of TrajectoryGroup or Trajectory"),
        (lambda: [1.0], r"`trajectories\[0\]` is a float: 1.0, not a TrajectoryGroup or Trajectory: .*numbers without"),
        (lambda: [with_reward(None)], "a trajectory has reward None; it must be a number"),
        (lambda: [with_reward("1.0")], "a trajectory has reward '1.0'; it must be a number"),
        (
            lambda: [with_reward(1.0, color="blue")],
            "metric 'color' is 'blue', not a number; text belongs in `metadata`",
        ),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
async def test_what_cannot_be_logged_is_named(model: art.TrainableModel, trajectories: Any, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        await model.log(trajectories(), split="val")
    gc.collect()
    assert not paths_of(model).history.exists()


async def test_one_trajectory_can_be_logged_and_a_metric_must_be_a_number(model: art.TrainableModel) -> None:
    await model.log(with_reward(1.0), split="val", metrics={"nan": math.nan})  # type: ignore[arg-type]
    assert history(model)[0]["val/reward"] == 1.0
    with pytest.raises(InvalidRequestError, match=r"metrics\['color'\] is 'blue'; a metric is a number"):
        await model.log(metrics={"color": "blue"})  # type: ignore[dict-item]


async def test_the_result_of_a_step_that_trained_nothing_can_be_logged(
    model: art.TrainableModel, server: FakeArtServer
) -> None:
    await model.train([group(0, 1)])
    server.nothing_to_learn = True
    result = await model.train([group(1, 1)])
    assert (result.trained, result.step) == (False, 1)
    rows = history(model)
    assert [row["step"] for row in rows] == [1, 1], "one more row, and the one of the step is still there"
    assert rows[1]["data/step_num_groups_trainable"] == 0
    assert [len(read) for read in read_groups(paths_of(model).trajectories("train", 1))] == [2, 2]
    with pytest.raises(NothingTrainableError):
        await model.train([group(1, 1)], on_nothing="raise")
    with pytest.raises(TrajectoryError, match=r"The rollouts of one scenario, .* are a group"):
        await model.train(list(group(0, 1)))  # type: ignore[arg-type]


# --- training, in both styles ---


async def test_2025_style(model: art.TrainableModel) -> None:
    for step in range(await model.get_step(), 2):
        await model.train([group(0, 1)], config=art.TrainConfig(learning_rate=1e-5))
        assert await model.get_step() == step + 1
    rows = history(model)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["train/reward"] == 0.5
    assert rows[0]["loss/train"] == 0.5
    assert rows[0]["data/step_num_trajectories"] == 2
    assert len(list(read_groups(paths_of(model).trajectories("train", 1)))) == 1
    with pytest.raises(ConfigError, match="kimi_k2_tau"):
        await model.train([group(0, 1)], _config={"kimi_k2_tau": 0.1})
    assert not (await model.train([])).trained, "a step that lost all groups does not end the script"


async def test_2026_style(model: art.TrainableModel) -> None:
    groups = [group(0, 1)]
    result = await model.backend().train(model, groups, learning_rate=1e-5)
    await model.log(groups, split="train", metrics=result.metrics, step=result.step)
    row = {key: value for key, value in history(model)[0].items() if "gpu/" not in key}  # device time is never the same
    assert row | {"recorded_at": "", "time/wall_clock_sec": 0} == {
        "train/reward": 0.5,
        "train/reward_std_dev": 0.5,
        "train/exception_rate": 0.0,
        "data/step_num_scenarios": 1,
        "data/step_num_groups_submitted": 1,
        "data/step_num_groups_trainable": 1,
        "data/step_num_trajectories": 2,
        "data/cum/num_groups_trainable": 1,
        "data/cum/num_scenarios": 1,
        "data/cum/num_groups_submitted": 1,
        "data/cum/num_trajectories": 2,
        "loss/train": 0.5,
        "training_step": 1,
        "time/wall_clock_sec": 0,
        "step": 1,
        "recorded_at": "",
    }


async def test_train_sft_logs_its_metrics(model: art.TrainableModel) -> None:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    result = await model.train_sft([art.Trajectory(messages_and_choices=items)], config=art.TrainSFTConfig())
    assert result.step == 1
    assert history(model)[0]["loss/train"] == 0.5


# --- the log ---


async def test_logging_twice_loses_nothing(model: art.TrainableModel) -> None:
    await model.log([group(0, 1)], split="val", step=3)
    await model.log([group(1, 1)], split="val", step=3)
    found = list(read_groups(paths_of(model).trajectories("val", 3)))
    assert [[t.reward for t in g] for g in found] == [[0, 1], [1, 1]]
    assert isinstance(found[0].trajectories[0].messages_and_choices[1], Choice)
    assert len(history(model)) == 2


async def test_concurrent_logs_do_not_mix(model: art.TrainableModel) -> None:
    big = [group(*range(50)) for _ in range(3)]
    await asyncio.gather(*(model.log(big, step=1, metrics={"n": i}) for i in range(8)))
    assert len(list(read_groups(paths_of(model).trajectories("val", 1)))) == 24
    assert sorted(row["val/n"] for row in history(model)) == list(range(8))


async def test_loose_trajectories_are_one_group(model: art.TrainableModel) -> None:
    await model.log([art.Trajectory(reward=1), ValueError("x"), art.Trajectory(reward=0)], split="val")
    (found,) = read_groups(paths_of(model).trajectories("val", 0))
    assert len(found) == 2
    assert [error.type for error in found.exceptions] == ["ValueError"]
    row = history(model)[0]
    assert (row["val/reward"], row["val/exception_rate"]) == (0.5, 1 / 3)
    single = group(1, 0, metadata={"scenario_id": "s"})
    await model.log(single, split="test")
    assert next(read_groups(paths_of(model).trajectories("test", 0))) == single


async def test_nan_is_recorded_as_null(model: art.TrainableModel) -> None:
    logged = group(math.nan, 1)
    logged.trajectories[0].turn_rewards, logged.trajectories[0].token_rewards = [math.nan], [[1.0, math.nan]]
    await model.log([logged], metrics={"loss/train": math.inf, "ok": 1.0})
    text = paths_of(model).history.read_text()
    row = json.loads(text, parse_constant=pytest.fail)
    assert row["val/reward"] is None
    assert row["loss/train"] is None
    assert row["val/ok"] == 1.0
    path = paths_of(model).trajectories("val", 0)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    (found,) = read_groups(path)
    first = found.trajectories[0]
    assert all(map(math.isnan, [first.reward, *first.turn_rewards, first.token_rewards[0][1]]))


@pytest.mark.parametrize(
    ("key", "split", "name"),
    [
        ("win", "val", "val/win"),
        ("reward", "train", "train/reward"),
        ("loss/train", "train", "loss/train"),
        ("val/reward", "train", "val/reward"),
        ("tools/errors", "val", "val/tools/errors"),
        ("loss/train", "discarded", "discarded/loss/train"),
        ("data/step_num_trajectories", "train", "data/step_num_trajectories"),
        ("findings/too_easy", "train", "findings/too_easy"),
    ],
)
def test_metric_names(key: str, split: str, name: str) -> None:
    assert metric_name(key, split) == name


def test_summaries() -> None:
    groups = [
        art.TrajectoryGroup(
            [
                art.Trajectory(reward=0, metrics={"win": False, "turns": 2, "costs/judge": 0.5}),
                art.Trajectory(reward=2, metrics={"win": True, "costs/judge": 0.25}),
            ],
            metrics={"judge": 1.0},
            metadata={"scenario_id": "a"},
        ),
        art.TrajectoryGroup([art.Trajectory(reward=1), ValueError()], metadata={"scenario_id": "a"}),
    ]
    assert summarize_groups(groups) == {
        "reward": 1,
        "reward_std_dev": 1,
        "exception_rate": 0.25,
        "win": 0.5,
        "turns": 2,
        "costs/judge": 0.75,
        "group_judge": 1,
    }
    assert count_groups(groups)["data/step_num_scenarios"] == 1
    assert summarize_groups([]) == {}


def test_wall_clock_goes_on_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_row(path, {"a": 1}, step=1)
    first = json.loads(path.read_text())
    path.write_text(json.dumps(first | {"recorded_at": "2020-01-01T00:00:00+00:00"}) + "\n")
    append_row(path, {"a": 1}, step=2)
    assert json.loads(path.read_text().splitlines()[1])["time/wall_clock_sec"] > 1e8


def test_a_line_that_a_crash_has_cut(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_row(path, {"val/reward": 0.5}, step=1)
    with path.open("a") as file:
        file.write('{"val/reward": 0.9, "st')
    assert means_by_step(path, "val/reward") == ({1: 0.5}, 0)
    append_row(path, {"val/reward": 0.7}, step=2)
    assert means_by_step(path, "val/reward") == ({1: 0.5, 2: 0.7}, 0)
    path.write_text(path.read_text().rstrip("\n"))  # as an editor may leave it: the last row is whole
    append_row(path, {"val/reward": 0.8}, step=3)
    assert means_by_step(path, "val/reward")[0] == {1: 0.5, 2: 0.7, 3: 0.8}


def test_groups_of_an_unknown_class_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    jsonl.append_lines(path, [{"trajectories": [{"reward": 1, "field_of_somebody": 2}]}])
    with pytest.raises(StorageError, match="import it before"):
        list(read_groups(path))


# --- state ---


def test_state(tmp_path: Path) -> None:
    model = art.Model(name="n", project="p", base_path=str(tmp_path))
    assert model.read_state() is None
    assert model.merge_state({"a": {"x": 1}, "b": 1}) == {"a": {"x": 1}, "b": 1}
    assert model.merge_state({"a": {"y": 2}, "b": {"z": 1}}) == {"a": {"x": 1, "y": 2}, "b": {"z": 1}}
    assert model.read_state() == {"a": {"x": 1, "y": 2}, "b": {"z": 1}}
    with pytest.raises(StorageError, match="JSON"):
        model.overwrite_state({"bad": object()})
    assert model.read_state() is not None, "the old state stays"
    model.write_state({"c": 1})
    assert model.read_state() == {"c": 1}
    paths_of(model).state.write_text("{broken")
    with pytest.raises(StorageError, match=r"state\.json"):
        model.read_state()


# --- checkpoints ---


async def kept(model: art.TrainableModel, server: FakeArtServer, metric: str = "val/reward") -> list[int] | None:
    server.models["games/agent"].step = 9
    server.requests.clear()
    await model.delete_checkpoints(metric)
    calls = [body["keep_steps"] for _, path, body in server.requests if path.endswith("checkpoints/delete")]
    return calls[0] if calls else None


async def test_newest_and_best_are_kept(model: art.TrainableModel, server: FakeArtServer) -> None:
    assert await kept(model, server) == [9], "nothing was ever measured"
    for step in range(1, 150):  # the metric appears late, first as an integer
        append_row(paths_of(model).history, {"train/reward": 1.0}, step=step % 9)
    for step, reward in ((3, 1), (4, 0.5), (5, 0.25), (3, 0.0)):
        append_row(paths_of(model).history, {"val/reward": reward}, step=step)
    append_row(paths_of(model).history, {"val/reward": math.nan}, step=6)
    assert await kept(model, server) == [4, 9], "step 3 has a mean of 0.5 too, and 4 is newer"
    assert await kept(model, server, "val/other") == [9]


async def test_with_a_damaged_history_nothing_is_deleted(
    model: art.TrainableModel, server: FakeArtServer, caplog: pytest.LogCaptureFixture
) -> None:
    append_row(paths_of(model).history, {"val/reward": 1}, step=1)
    with paths_of(model).history.open("a") as file:
        file.write("gibberish\n")
    append_row(paths_of(model).history, {"val/reward": 0}, step=2)
    with caplog.at_level(logging.WARNING):
        assert await kept(model, server) is None
    assert "no checkpoint is deleted" in caplog.text


# --- the OpenAI client ---


class ChatServer:
    """Answers chat requests over real sockets; may drop connections first."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_connections = 0
        self.drop = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(
                    next(line.split(b":")[1] for line in head.lower().split(b"\r\n") if b"content-length" in line)
                )
                await reader.readexactly(length)
                self.num_requests += 1
                if self.drop > 0:
                    self.drop -= 1
                    break
                writer.write(CHAT_ANSWER)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


_CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}, "exchange_id": "e7"}
_BODY = json.dumps({"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [_CHOICE]}).encode()
CHAT_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)


@pytest.fixture
async def chat() -> AsyncIterator[ChatServer]:
    chat = ChatServer()
    server = await asyncio.start_server(chat.serve, "127.0.0.1", 0)
    chat.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    yield chat
    server.close()


async def ask(model: art.Model) -> Choice:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[{"role": "user", "content": "q"}]
    )
    return completion.choices[0]


async def test_openai_client(chat: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nothing that is on this machine goes there
    model = art.Model(name="m", project="p", inference_base_url=chat.url, inference_api_key="k")
    client = model.openai_client()
    assert isinstance(client, openai.AsyncOpenAI)
    assert model.openai_client() is client
    chat.drop = 1
    choice = await ask(model)
    assert choice.exchange_id == "e7"  # type: ignore[attr-defined]
    assert chat.num_requests == 2, "asked again after the lost connection"
    await asyncio.gather(*(ask(model) for _ in range(20)))
    assert chat.num_connections <= 22
    await model.close()
    assert client.is_closed()
    assert model.openai_client() is not client
    await model.close()


async def test_backend_close_closes_the_clients_of_its_models(chat: ChatServer, server: FakeArtServer) -> None:
    backend = FakeBackend(server)
    model = art.Model(name="m", project="p", inference_base_url=chat.url, inference_api_key="k")
    await model.register(backend)
    client = model.openai_client()
    await ask(model)
    await backend.close()
    assert client.is_closed()


SEVERAL_LOOPS = """
import asyncio, sys, art
model = art.Model(name="m", project="p", inference_base_url=sys.argv[1], inference_api_key="k")
seen = []
async def main():
    for _ in range(3):
        client = model.openai_client()
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
    seen.append(client)
for _ in range(2):
    asyncio.run(main())
assert seen[0] is not seen[1]
assert seen[0].is_closed() and seen[1].is_closed()
"""


async def test_a_script_that_never_closes_ends_without_noise(chat: ChatServer) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "dev", "-c", SEVERAL_LOOPS, chat.url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, err = await asyncio.wait_for(child.communicate(), 60)
    noise = [line for line in err.decode().splitlines() if "nclosed" in line or "rror" in line or "never" in line]
    assert child.returncode == 0, err.decode()
    assert noise == []


def test_openai_client_outside_of_a_loop() -> None:
    model = art.Model(name="m", project="p", inference_base_url="http://127.0.0.1:9/v1", inference_api_key="k")
    assert model.openai_client() is not model.openai_client()


# --- the record of settings ---


async def test_settings_of_a_run_are_recorded_without_secrets(
    server: FakeArtServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "/usr/bin/train.py",
        "--api-key",
        "k3y-of-mine",
        "--header",
        "X-Auth: s3cret",
        "--steps",
        "4",
        "--token=t0ken",
        "-o",
        "search_key=s3arch",
    ]
    monkeypatch.setattr(sys, "argv", words)
    run_settings.describe_program.cache_clear()
    model = art.TrainableModel(name="agent", project="games", base_model="base", base_path=str(tmp_path))
    try:
        await model.register(FakeBackend(server))
    finally:
        run_settings.describe_program.cache_clear()
    await model.train([group(0.0, 1.0)], learning_rate=3e-4)
    text = paths_of(model).settings.read_text()
    recorded = json.loads(text)
    command = (
        "train.py --api-key '[redacted]' --header 'X-Auth: ...' --steps 4 '--token=[redacted]' "
        "-o 'search_key=[redacted]'"
    )
    assert recorded["program"]["command"] == command
    assert recorded["program"]["python"].startswith("3.")
    assert recorded["machine"].keys() == {"host", "system", "cores", "memory_gb", "gpus"}
    assert recorded["training"]["learning_rate"] == 3e-4
    assert recorded["settings"]["lora"]["rank"] == LoraConfig().rank
    assert not [secret for secret in ("k3y-of-mine", "s3cret", "t0ken", "s3arch") if secret in text]
