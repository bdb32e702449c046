"""Checkpoints of a server, through its API: listed, kept, fetched, forked, merged, sent to a store."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
import torch

import art
from art.backend import Backend
from art.client.client import ServerClient
from art.config import ServerConfig
from art.errors import ConfigError, ConflictError, NotFoundError, StorageError
from art.runtime.runtime import Runtime
from art.server.app import App
from art.storage import checkpoints
from tests.support.object_store import open_store

in_module_loop = pytest.mark.asyncio(loop_scope="module")
PROMPT = [{"role": "user", "content": "say yes, no or maybe"}]


class Cuts(httpx2.AsyncBaseTransport):
    """Files break off in the middle, as often as `remaining` says."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx2.ASGITransport(app)
        self.remaining = 0
        self.ranges: list[str | None] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        if "/files/" not in request.url.path:
            return response
        self.ranges.append(request.headers.get("range"))
        body = await response.aread()
        if self.remaining == 0 or len(body) < 2:
            return response
        self.remaining -= 1

        async def half() -> AsyncIterator[bytes]:
            yield body[: len(body) // 2]
            raise httpx2.ReadError("cut")

        return httpx2.Response(response.status_code, headers=response.headers, content=half())


class InProcess(Backend):
    """A backend of a runtime in this process."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self.transport = Cuts(App(runtime, api_key="key"))
        self._client = ServerClient("http://art.test", "key", transport=self.transport)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcess]:
    runtime = Runtime(tmp_path_factory.mktemp("data"), ServerConfig())
    await runtime.start()
    yield InProcess(runtime)
    await runtime.close()


def named(name: str, tiny_model: Path, **options: Any) -> art.TrainableModel:
    return art.TrainableModel(name=name, project="p", base_model=str(tiny_model), **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(backend: InProcess, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> art.TrainableModel:
    """At step 3; step 1 was the best."""
    model = named("agent", tiny_model, base_path=str(tmp_path_factory.mktemp("log")))
    await model.register(backend)
    answer = art.Trajectory(messages_and_choices=[*PROMPT, {"role": "assistant", "content": "maybe"}])
    for reward in (0.9, 0.2, 0.5):
        result = await backend.train_sft(model, [answer], art.TrainSFTConfig(learning_rate=1e-2))
        await model.log([art.Trajectory(messages_and_choices=PROMPT, reward=reward)], step=result.step)
    return model


@in_module_loop
async def test_the_list_says_which_is_the_best(backend: InProcess, model: art.TrainableModel) -> None:
    found = await backend.list_checkpoints(model)
    assert [info.step for info in found] == [0, 1, 2, 3]
    assert [(info.best, info.newest) for info in found] == [
        (False, False),
        (True, False),
        (False, False),
        (False, True),
    ]
    assert found[1].metrics["val/reward"] == 0.9
    assert "loss/train" in found[1].metrics
    assert found[1].size_bytes > 10_000
    assert [info.best for info in await backend.list_checkpoints(model, best_metric="loss/none")] == [False] * 4


@in_module_loop
async def test_retention_keeps_the_best_the_newest_and_what_is_in_use(
    backend: InProcess, model: art.TrainableModel, tiny_model: Path
) -> None:
    copy = named("kept", tiny_model, base_path=model.base_path)
    source = backend.runtime.data_dir.model("p", "agent").checkpoints
    shutil.copytree(source, backend.runtime.data_dir.model("p", "kept").checkpoints)
    await copy.register(backend)
    await backend.log_metrics(copy, 1, {"val/reward": 0.9})
    host = backend.runtime.models.find("p", "kept")[1]
    host.engine.in_use["p/kept@2"] += 1
    try:
        assert await backend.checkpoints.delete(copy) == [0]
    finally:
        host.engine.in_use["p/kept@2"] -= 1
    assert await backend.checkpoints.delete(copy) == [2]
    assert [info.step for info in await backend.list_checkpoints(copy)] == [1, 3]


@in_module_loop
async def test_the_promoted_checkpoint_answers_while_training_goes_on(
    backend: InProcess, model: art.TrainableModel, tiny_model: Path
) -> None:
    settings = art.ModelSettings(trainer=art.config.TrainerConfig(keep_moments=2))
    shop = named("shop", tiny_model, settings=settings)
    await backend.fork(shop, model, step=1)
    await shop.register(backend)
    http = httpx2.AsyncClient(transport=backend.transport, base_url="http://art.test", headers={"x-api-key": "key"})

    async def ask() -> httpx2.Response:
        chat = {"model": "p/shop@promoted", "messages": PROMPT, "temperature": 0}
        return await http.post("/v1/chat/completions", json=chat)

    refused = await ask()
    assert refused.status_code == 404
    assert "art promote p/shop" in refused.json()["error"]["message"]
    assert await shop.promote() == "p/shop@promoted" == shop.get_inference_name("promoted")
    first = (await ask()).json()["choices"][0]["message"]["content"]
    answer = art.Trajectory(messages_and_choices=[*PROMPT, {"role": "assistant", "content": "no"}])
    for _ in range(3):
        await backend.train_sft(shop, [answer], art.TrainSFTConfig(learning_rate=3e-2))
    client = await backend._connection()
    assert [(card.id, card.step) for card in await client.list_models() if "shop" in card.id] == [
        ("p/shop", 4), ("p/shop@promoted", 1)
    ]  # fmt: skip
    folder = backend.runtime.data_dir.model("p", "shop").checkpoint(1)
    assert not checkpoints.has_moments(folder), "only training needs them"
    assert await backend.checkpoints.delete(shop) == [2, 3], "step 1 stays"
    host = backend.runtime.models.find("p", "shop")[1]
    await host.adapters.forget("p/shop@1")  # as if others had taken its place
    again = (await ask()).json()["choices"][0]
    assert again["message"]["content"] == first
    assert backend.runtime.gateway.recorder.get([again["exchange_id"]])[0].policy_version == 1
    assert (await http.post("/api/models/p/shop/checkpoints/9/promote")).status_code == 404
    moved = await http.post("/api/models/p/shop/checkpoints/4/promote")
    assert moved.json() == {"step": 4, "inference_name": "p/shop@promoted", "previous_step": 1}
    assert (await shop.backend().get_step(shop), (await client.model_status("p", "shop")).promoted_step) == (4, 4)
    assert await backend.checkpoints.delete(shop) == [1]
    await http.aclose()


@in_module_loop
async def test_a_download_that_is_cut_goes_on_where_it_was(
    backend: InProcess, model: art.TrainableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda delay_s: sleep(0))
    backend.transport.remaining = 5
    path = await backend.download_checkpoint(model, tmp_path / "here", step=2)
    original = backend.runtime.data_dir.model("p", "agent").checkpoint(2)
    checkpoints.verify(path)
    assert checkpoints.identify(path) == checkpoints.identify(original)
    assert sum(wanted is not None for wanted in backend.transport.ranges) == 5
    assert os.listdir(tmp_path) == ["here"]
    assert await backend.download_checkpoint(model, path, step=2) == path, "what is there is not fetched again"
    with pytest.raises(ConfigError, match="is not this checkpoint"):
        await backend.download_checkpoint(model, path, step=3)


@in_module_loop
async def test_an_interrupted_download_leaves_nothing_that_looks_whole(
    backend: InProcess, model: art.TrainableModel, tmp_path: Path
) -> None:
    partial = tmp_path / ".here.partial"
    partial.mkdir()
    (partial / "adapter_model.safetensors").write_bytes(b"of another version")
    (partial / "junk").write_text("x")
    path = await backend.download_checkpoint(model, tmp_path / "here")
    checkpoints.verify(path)
    assert not (path / "junk").exists()
    with pytest.raises(NotFoundError):
        await backend.download_checkpoint(model, tmp_path / "other", step=17)
    assert not (tmp_path / "other").exists()


@in_module_loop
async def test_ranges_of_files(backend: InProcess, model: art.TrainableModel) -> None:
    app = App(backend.runtime, api_key="key")
    url = "/api/models/p/agent/checkpoints/3/files/state.json"
    whole = (backend.runtime.data_dir.model("p", "agent").checkpoint(3) / "state.json").read_bytes()
    headers = {"Authorization": "Bearer key"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://art.test") as http:

        async def get(**further: str) -> httpx2.Response:
            return await http.get(
                url, headers=headers | {key.replace("_", "-"): value for key, value in further.items()}
            )

        full = await get()
        assert (full.status_code, full.content) == (200, whole)
        part = await get(Range="bytes=5-9", If_Range=full.headers["etag"])
        assert (part.status_code, part.content) == (206, whole[5:10])
        assert part.headers["content-range"] == f"bytes 5-9/{len(whole)}"
        assert (await get(Range="bytes=5-", If_Range='"other"')).content == whole
        assert (await get(Range="bytes=-5")).content == whole[-5:]
        for odd in ("bytes=9-5", "lines=1-2"):
            assert (await get(Range=odd)).status_code == 400, odd
        assert (await get(Range=f"bytes={len(whole)}-")).status_code == 416
        for name in ("..%2F..%2Fstate.json", "optimizer.pt", "%2e%2e"):
            bad = await http.get(f"/api/models/p/agent/checkpoints/3/files/{name}", headers=headers)
            assert bad.status_code in (400, 404), name


@in_module_loop
async def test_forks_before_and_after_registration(
    backend: InProcess, model: art.TrainableModel, tiny_model: Path
) -> None:
    early, late = named("early", tiny_model), named("late", tiny_model)
    assert await backend.fork(early, model, not_after_step=2) == 2
    await early.register(backend)
    await late.register(backend)
    assert await backend.fork(late, "agent") == 3
    assert [await early.get_step(), await late.get_step()] == [2, 3]
    answer = art.Trajectory(messages_and_choices=[*PROMPT, {"role": "assistant", "content": "maybe"}])
    assert (await backend.train_sft(late, [answer])).step == 4
    await backend._experimental_fork_checkpoint(late, "agent")
    assert await late.get_step() == 4, "a script that is run again goes on"
    with pytest.raises(ConflictError, match="at step 4 already"):
        await backend.fork(late, early)
    with pytest.raises(NotFoundError, match=r"its steps: 0, 1, 2, 3"):
        await backend.fork(named("none", tiny_model), model, step=9)
    other = named("other", tiny_model, settings=art.ModelSettings(lora=art.config.LoraConfig(rank=2)))
    await other.register(backend)
    with pytest.raises(ConfigError, match="LoRA settings"):
        await backend.fork(other, model)
    assert await other.get_step() == 0
    assert [info.step for info in await backend.list_checkpoints(other)] == [0]


@in_module_loop
async def test_old_steps_lose_their_moments_and_training_from_one_says_so(
    backend: InProcess, tiny_model: Path, tmp_path: Path
) -> None:
    settings = art.ModelSettings(trainer=art.config.TrainerConfig(keep_moments=2))
    thrifty, branch = named("thrifty", tiny_model, settings=settings), named("branch", tiny_model)
    await thrifty.register(backend)
    answer = art.Trajectory(messages_and_choices=[*PROMPT, {"role": "assistant", "content": "maybe"}])
    results = [await backend.train_sft(thrifty, [answer]) for _ in range(4)]
    assert [result.metrics["loss/optimizer_updates"] for result in results] == [1, 2, 3, 4]
    paths = [backend.runtime.data_dir.model("p", "thrifty").checkpoint(step) for step in range(5)]
    assert [checkpoints.has_moments(path) for path in paths] == [False, False, False, True, True]
    fetched = await backend.download_checkpoint(thrifty, tmp_path / "here", step=2)
    checkpoints.verify(fetched)
    assert checkpoints.identify(fetched) == checkpoints.identify(paths[2])
    assert await backend.fork(branch, thrifty, step=2) == 2
    await branch.register(backend)
    result = await backend.train_sft(branch, [answer])
    assert (result.step, result.metrics["loss/optimizer_updates"]) == (3, 1)
    assert any("the optimiser started without moments" in finding for finding in result.findings)
    await backend.train_sft(thrifty, [answer])
    assert [checkpoints.has_moments(path) for path in paths] == [False, False, False, False, True]


def logprobs_of(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        loaded = PeftModel.from_pretrained(loaded, adapter)
    tokens = torch.arange(1, 24).unsqueeze(0) % loaded.config.vocab_size
    with torch.no_grad():
        return loaded(tokens).logits.log_softmax(-1)


@pytest.mark.slow
@in_module_loop
async def test_exports_compute_what_was_trained(
    backend: InProcess, model: art.TrainableModel, tiny_model: Path, tmp_path: Path
) -> None:
    made = await backend.export(model, "merged", path=tmp_path / "merged")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(made["files"])
    await backend.export(model, "peft", step=3, path=tmp_path / "adapter")
    merged, adapted = logprobs_of(tmp_path / "merged"), logprobs_of(tiny_model, tmp_path / "adapter")
    assert float((merged - adapted).abs().max()) < 1e-4
    assert float((merged - logprobs_of(tiny_model)).abs().max()) > 1e-2
    with pytest.raises(NotFoundError):
        await backend.download_checkpoint(model, tmp_path / "none", step=2, format="merged")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with open_store(monkeypatch) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield "s3://team/runs"


@pytest.mark.slow
@in_module_loop
async def test_there_and_back_through_a_store(
    backend: InProcess, model: art.TrainableModel, tiny_model: Path, store: str, tmp_path: Path
) -> None:
    for step in (2, 3):
        url = await backend.push(model, store, step=step)
    assert url == "s3://team/runs/p/models/agent/checkpoints/0003"
    back = named("back", tiny_model)
    assert await backend.pull(back, store, from_model="agent", not_after_step=2) == 2
    await back.register(backend)
    assert await back.get_step() == 2
    data = backend.runtime.data_dir
    assert checkpoints.identify(data.model("p", "back").checkpoint(2)) == checkpoints.identify(
        data.model("p", "agent").checkpoint(2)
    )
    await backend._experimental_push_to_s3(model, s3_bucket="team", prefix="runs")
    again = named("again", tiny_model)
    await again.register(backend)
    await backend._experimental_fork_checkpoint(again, "agent", from_s3_bucket="team", prefix="runs")
    assert await again.get_step() == 3
    fresh = named("fresh", tiny_model)
    await backend._experimental_pull_from_s3(fresh, s3_bucket="team", prefix="empty", only_step="latest")
    await fresh.register(backend)
    assert await fresh.get_step() == 0, "the first run of a script finds nothing, and goes on"
    with pytest.raises(ImportError, match=r"backend\.export"):
        _ = backend._experimental_deploy
    with pytest.raises(ImportError, match=r"backend\.download_checkpoint"):
        _ = backend._experimental_pull_model_checkpoint
    for wrong in ({"delete": True}, {"exclude": ["logs", "checkpoints"]}):
        with pytest.raises(ConfigError, match=r"delete=True|leave out checkpoints"):
            await backend._experimental_pull_from_s3(again, s3_bucket="team", **wrong)
    with pytest.raises(NotFoundError, match=r"steps: 2, 3"):
        await backend.pull(named("none", tiny_model), store, from_model="agent", step=1)
    with pytest.raises(StorageError, match="cannot send"):
        await backend.push(model, "s3://no-such-bucket/x")
