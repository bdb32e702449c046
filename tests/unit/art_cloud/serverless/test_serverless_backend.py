"""`ServerlessBackend` beside training: registration, names, log-probs, captures, checkpoints, and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

import art
from art.capture import without_step
from art.client.checkpoint_client import Checkpoints
from art.errors import ConfigError, ConflictError, NothingTrainableError, ProcessError, TrajectoryError
from art_cloud.serverless_backend import BASE_URL, RefusedMethod, ServerlessCheckpoints
from tests.support.fake_serverless import BASE_MODEL, ENTITY, KEY, FakeServerless
from tests.support.serverless_runs import group, new_model, open_backend, rollout
from tests.support.serverless_shapes import API

NAME = f"wandb-artifact:///{ENTITY}/shop/agent"


@pytest.fixture
async def fake() -> AsyncIterator[FakeServerless]:
    async with FakeServerless().running() as fake:
        yield fake


@pytest.fixture
async def backend(fake: FakeServerless, tmp_path: Path) -> AsyncIterator[art.ServerlessBackend]:
    async with open_backend(fake, tmp_path) as backend:
        yield backend


@pytest.fixture
async def model(backend: art.ServerlessBackend, tmp_path: Path) -> art.TrainableModel:
    model = new_model(tmp_path)
    await model.register(backend)
    return model


def test_the_address_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BASE_URL in API["bases"]
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        art.ServerlessBackend()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert repr(art.ServerlessBackend()) == "<ServerlessBackend at https://api.training.wandb.ai/v1>"
    with pytest.raises(ConfigError, match=r"must be an address like .* got 'elsewhere'"):
        art.ServerlessBackend(base_url="elsewhere")
    from art_cloud.serverless_backend import ServerlessBackend as OlderName

    assert OlderName is art.ServerlessBackend


async def test_registration_names_and_steps(backend: art.ServerlessBackend, model: art.TrainableModel) -> None:
    assert model.inference_base_url == backend._service.base_url
    assert model.get_inference_name() == NAME
    assert model.get_inference_name(25) == f"{NAME}:step25"
    assert await model.get_step() == 0
    assert await backend.base_models() == [BASE_MODEL]
    with pytest.raises(ConfigError, match="no promoted checkpoint"):
        model.get_inference_name("promoted")
    await model.train([await group(model, 0.0, 1.0)], loss="cispo")
    assert (await backend.get_status(model)).step == 1


async def test_a_registration_can_be_repeated_and_clashes_by_base_model(
    fake: FakeServerless, backend: art.ServerlessBackend, model: art.TrainableModel, tmp_path: Path
) -> None:
    await new_model(tmp_path).register(backend)
    assert len(fake.models) == 1
    with pytest.raises(ConflictError, match=r"a model shop/agent of OpenPipe/Qwen3-14B-Instruct, not of owner/other"):
        await new_model(tmp_path, base_model="owner/other").register(backend)
    with pytest.raises(ConfigError, match=r"settings\.lora"):
        await new_model(tmp_path, settings=art.ModelSettings(lora=art.LoraConfig(rank=4))).register(backend)
    assert await backend.register(art.Model(name="judge", project="shop", inference_base_url="http://x/v1")) is None  # type: ignore[arg-type]


async def test_requests_ask_for_logprobs_unless_they_decide_themselves(
    fake: FakeServerless, model: art.TrainableModel
) -> None:
    messages: Any = [{"role": "user", "content": "yes?"}]
    asked: dict[str, Any] = {"model": model.get_inference_name(), "messages": messages}
    answer = await model.openai_client().chat.completions.create(**asked)
    assert answer.choices[0].logprobs is not None
    await model.openai_client().with_options(timeout=9).chat.completions.create(**asked)
    await model.openai_client().chat.completions.create(**asked, logprobs=False)
    assert [body.get("logprobs") for body in fake.asked] == [True, True, False]


async def test_a_client_that_blocks_asks_for_logprobs_too(fake: FakeServerless, model: art.TrainableModel) -> None:
    import asyncio

    def ask() -> Any:
        return model.blocking_openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=[{"role": "user", "content": "yes?"}]
        )

    assert (await asyncio.to_thread(ask)).choices[0].logprobs is not None


async def test_a_capture_keeps_what_the_client_receives(model: art.TrainableModel) -> None:
    async with art.capture(model) as captured:
        await rollout(model, 0.0)
        with pytest.raises(ConfigError, match="'agent', which no ART server records"):
            _ = captured.base_url
    choice = captured.trajectory.messages_and_choices[-1]
    assert choice.logprobs.content[0].logprob == -1.1
    captured.trajectory.reward = 1.0
    groups = [art.TrajectoryGroup([captured.trajectory, await rollout(model, 0.0)])]
    assert (await model.backend().train(model, groups)).step == 1


@pytest.mark.parametrize("step", [None, 0])
async def test_a_capture_sees_clients_of_others_by_name_and_step(model: art.TrainableModel, step: int | None) -> None:
    async with art.capture(model) as captured, httpx2.AsyncClient() as other:
        await other.post(
            f"{model.inference_base_url}/chat/completions", headers={"Authorization": f"Bearer {KEY}"},
            json={"model": model.get_inference_name(step), "messages": [{"role": "user", "content": "yes?"}]},
        )  # fmt: skip
    assert [type(item).__name__ for item in captured.trajectory.messages_and_choices] == ["dict", "Choice"]
    assert [without_step(name) for name in ("p/m", "p/m@3", f"{NAME}:step3")] == ["p/m", "p/m", NAME]


async def test_checkpoints_are_listed_and_deleted(fake: FakeServerless, model: art.TrainableModel) -> None:
    for _ in range(5):
        await model.train([await group(model, 0.0, 1.0)])
    backend = model.backend()
    listed = await backend.list_checkpoints(model)
    assert [(one.step, one.newest, one.best) for one in listed] == [
        (1, False, True), (2, False, False), (3, False, False), (4, False, False), (5, True, False),
    ]  # fmt: skip
    assert await backend.delete_checkpoints(model, keep_steps=[2]) == [3, 4]
    assert await backend.delete_checkpoints(model, keep_steps=[2]) == []
    await model.log(metrics={"reward": 9.0}, split="val", step=2)
    await model.delete_checkpoints()
    assert [one.step for one in await backend.list_checkpoints(model)] == [1, 2, 5]


def public_methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}


DONE_HERE = {
    "register", "train", "train_sft", "follow_train_job", "get_step", "get_status", "token_counts", "log_metrics",
    "send_log",
    "name_of_step", "close", "close_with", "list_checkpoints", "delete_checkpoints",
}  # fmt: skip
BY_CHECKPOINTS = {"download_checkpoint", "fork", "export", "push", "pull"}


async def test_each_method_of_a_backend_is_done_or_refused_by_name(
    fake: FakeServerless, model: art.TrainableModel
) -> None:
    backend, num_requests = model.backend(), len(fake.requests)
    refused = {name for name, value in vars(art.ServerlessBackend).items() if isinstance(value, RefusedMethod)}
    assert public_methods(art.Backend) == DONE_HERE | BY_CHECKPOINTS | refused | {"for_worker"}
    with pytest.raises(ConfigError, match="leave `workers` out"):
        backend.for_worker(None, None)
    for name in refused | BY_CHECKPOINTS:
        own = name.removesuffix("_checkpoint")
        with pytest.raises(ConfigError, match=f"ServerlessBackend has no `{own}`: "):
            await getattr(backend, name)(model)
    of_checkpoints = {name for name, value in vars(ServerlessCheckpoints).items() if isinstance(value, RefusedMethod)}
    assert public_methods(Checkpoints) == {"list", "delete"} | of_checkpoints
    with pytest.raises(ConfigError, match="has no `promote`"):
        await model.promote()
    with pytest.raises(ConfigError, match="'agent' records no requests"):
        model.rollout_base_url("r-1")
    assert len(fake.requests) == num_requests, "all before anything is sent"


async def test_trajectories_that_the_service_cannot_learn_are_refused(
    fake: FakeServerless, model: art.TrainableModel
) -> None:
    backend, num_requests = model.backend(), len(fake.requests) + 2

    async def refusal(match: str, kind: type[Exception] = TrajectoryError, **changes: Any) -> None:
        good = await group(model, 0.0, 1.0)
        for name, value in changes.items():
            setattr(good.trajectories[1], name, value)
        with pytest.raises(kind, match=match):
            await backend.train(model, [good])

    one = await rollout(model, 0.0)
    silent = one.messages_and_choices[1].model_copy(update={"logprobs": None})
    recorded = one.messages_and_choices[1].model_copy(update={"exchange_id": "e-1"})
    first = one.messages_and_choices[0]
    await refusal("trajectory 1 of group 0 has token_rewards", token_rewards=[[1.0]])
    await refusal("trajectory 1 of group 0 has turn_rewards", turn_rewards=[1.0])
    await refusal("an answer without log-probs", messages_and_choices=[first, silent])
    await refusal(
        "that an ART server sampled", additional_histories=[art.History(messages_and_choices=[first, recorded])]
    )
    plain = [first, {"role": "assistant", "content": "yes"}]
    with pytest.raises(NothingTrainableError, match="no trajectory has an answer that the model sampled"):
        await backend.train(
            model, [art.TrajectoryGroup([art.Trajectory(messages_and_choices=plain, reward=r) for r in (0.0, 1.0)])]
        )
    with pytest.raises(ConfigError, match="leave out `sft`"):
        await backend.train(model, [await group(model, 0.0, 1.0)], sft=[art.Trajectory(messages_and_choices=plain)])
    assert not any("training-jobs" in request for request in fake.requests)
    assert len(fake.requests) > num_requests  # the rollouts


def fake_wandb(monkeypatch: pytest.MonkeyPatch, *, broken: bool = False) -> list[Any]:
    """Install a module that takes artifacts as wandb does. Returns what it was given."""
    taken: list[Any] = []

    class Artifact:
        def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
            self.name, self.type, self.metadata, self.files = name, type, metadata, {}

        def add_file(self, path: str, name: str) -> None:
            self.files[name] = Path(path).read_text(encoding="utf-8")

        def wait(self, timeout: int) -> None:
            if broken:
                raise ValueError("quota exceeded")

    def init(**options: Any) -> Any:
        taken.append(options)
        run = SimpleNamespace(finish=lambda: taken.append("finished"))
        run.log_artifact = lambda artifact: taken.append(artifact) or artifact
        return run

    module = SimpleNamespace(init=init, Artifact=Artifact, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return taken


def lesson(*answers: str) -> art.Trajectory:
    return art.Trajectory(
        messages_and_choices=[
            {"role": "user", "content": "yes?"}, *({"role": "assistant", "content": text} for text in answers),
        ]
    )  # fmt: skip


async def test_supervised_fine_tuning_by_an_artifact(
    fake: FakeServerless, model: art.TrainableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = fake_wandb(monkeypatch)
    result = await model.train_sft([lesson("yes"), lesson("no")], learning_rate=1e-4, batch_size=1)
    assert (result.step, result.metrics["loss/train"], result.metrics["data/step_num_trajectories"]) == (1, 2.0, 2.0)
    options, artifact, finished = taken
    assert (options["entity"], options["project"], options["id"], finished) == (ENTITY, "shop", "run-1", "finished")
    assert options["settings"]["api_key"] == KEY
    lines = [json.loads(line) for line in artifact.files["train.jsonl"].splitlines()]
    assert [line["messages"][1]["content"] for line in lines] == ["yes", "no"]
    (job,) = fake.jobs.values()
    assert job.body["training_data_url"] == f"wandb-artifact:///{ENTITY}/shop/{artifact.name}:v0"
    assert job.body["config"] == {"batch_size": 1, "learning_rate": 1e-4}


async def test_supervised_data_that_does_not_arrive(
    fake: FakeServerless, model: art.TrainableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = model.backend()
    with pytest.raises(NothingTrainableError, match=r"no .*assistant message"):
        await backend.train_sft(model, [lesson()])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        await backend.train_sft(model, [lesson("yes")])
    fake_wandb(monkeypatch, broken=True)
    with pytest.raises(ProcessError, match="quota exceeded"):
        await backend.train_sft(model, [lesson("yes")])
    assert fake.jobs == {}
    fake_wandb(monkeypatch)
    assert (await backend.train_sft(model, [lesson("yes")])).step == 1
