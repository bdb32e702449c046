"""What the vLLM engine adds to vLLM (a fake server): names of adapters, zeros, several replicas, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from art.config import VllmConfig
from art.engine import GenerateRequest, Timings, TokenChunk
from art.engines.vllm.replica import seed_of
from art.engines.vllm.start import start_engine
from art.engines.vllm.vllm_engine import VllmEngine
from art.errors import (
    AdapterError,
    ArtError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    ProcessError,
)
from art.protocol.calls import StartVllm
from tests.support.fake_vllm import CONTEXT, VOCAB, FakeVllm


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 4096}))
    return str(folder)


@asynccontextmanager
async def engine_of(model: str, *servers: FakeVllm, **settings: Any) -> AsyncIterator[VllmEngine]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(server.serve()) for server in servers]
        config = VllmConfig.model_validate({"urls": urls, "device": "cpu"} | settings)
        engine, server = await start_engine(StartVllm(model=model, config=config, lora_rank=4))
        assert server is None
        stack.push_async_callback(engine.close)
        for fake in servers:
            fake.requests.clear()
        yield engine


def write_adapter(folder: Path, *, name: str = "down_proj") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    key = f"base_model.model.model.layers.0.mlp.{name}"
    factors = {f"{key}.lora_A.weight": np.ones((2, 3), np.float32), f"{key}.lora_B.weight": np.ones((5, 2), np.float32)}
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def ask(**fields: Any) -> GenerateRequest:
    defaults = {"request_id": "r", "adapter": None, "prompt_token_ids": [7, 8], "max_tokens": 4, "stop_token_ids": ()}
    return GenerateRequest(**{**defaults, "seed": 1, **fields})


async def run(engine: VllmEngine, *, stream: bool = False, **fields: Any) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(ask(**fields), stream=stream)]


async def test_requests_and_answers_are_translated(model: str) -> None:
    async with engine_of(model, fake := FakeVllm(), dtype="float32") as engine:
        info = await engine.info()
        assert (info.vocab_size, info.max_context, info.dtype) == (VOCAB, CONTEXT - 1, "float32")
        assert not info.draws_by_index
        (chunk,) = await run(engine, stop_token_ids=(11, VOCAB), num_top_logprobs=2, temperature=2.0)
        assert chunk == TokenChunk(
            token_ids=[9, 10, 11],
            logprobs=[-0.5] * 3,
            top_logprobs=[[(1, -0.3), (token, -0.5)] for token in (9, 10, 11)],
            finish_reason="stop",
            num_cached_tokens=3,
        )
        (sent,) = fake.requests
        assert sent["stop_token_ids"] == [11]  # vLLM refuses tokens outside of the vocabulary
        assert (sent["top_k"], sent["min_p"], sent["repetition_penalty"], sent["ignore_eos"]) == (0, 0.0, 1.0, True)
        streamed = await run(engine, stop_token_ids=(11,), num_top_logprobs=2, temperature=2.0, stream=True)
        assert [c.token_ids for c in streamed] == [[9], [10], [11]]
        assert [(c.finish_reason, c.num_cached_tokens) for c in streamed] == [(None, 0), (None, 0), ("stop", 3)]
        assert await engine.score([1] * (CONTEXT - 1), None) == [-1.0] * (CONTEXT - 2)


def test_a_resumed_request_has_another_valid_seed() -> None:
    seeds = [seed_of(ask(seed=seed, first_index=index)) for seed in (0, 1, 2**64 - 1) for index in (0, 1, 7)]
    assert len(set(seeds)) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_each_load_of_an_adapter_has_its_own_name(model: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    async with engine_of(model, fake := FakeVllm(), device="cuda") as engine:
        info = await engine.load_adapter("m@1", path)
        assert (info.num_layers, info.rank, info.norm) == (1, 2, None)  # vLLM does not tell what it holds
        (first,) = fake.adapters
        fake.gate.clear()
        running = asyncio.ensure_future(run(engine, adapter="m@1"))
        await until(lambda: fake.num_running == 1)
        await engine.load_adapter("m@1", path)
        assert len(fake.adapters) == 2  # the one before has a request
        (second,) = fake.adapters.keys() - {first}
        fake.gate.set()
        await running
        await until(lambda: [*fake.adapters] == [second])
        await run(engine, adapter="m@1")
        assert [request["model"] for request in fake.requests] == [first, second]
        await engine.unload_adapter("m@1")
        assert not fake.adapters
        with pytest.raises(NotFoundError, match="m@1"):
            await run(engine, adapter="m@1")


async def test_on_cpu_an_adapter_of_zeros_replaces_the_base_model(model: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    async with engine_of(model, fake := FakeVllm()) as engine:
        fake.gate.clear()
        running = asyncio.ensure_future(run(engine))
        await until(lambda: fake.num_running == 1)
        loading = asyncio.ensure_future(engine.load_adapter("m@1", path))
        await until(lambda: len(fake.adapters) == 1)
        zeros, folder = next(iter(fake.adapters.items()))
        weights = load_file(Path(folder) / "adapter_model.safetensors")
        assert [bool(value.any()) for _, value in sorted(weights.items())] == [True, False]
        await asyncio.sleep(0.05)
        assert not loading.done()  # a request for the base model runs, and must not meet the adapter
        fake.gate.set()
        await asyncio.gather(running, loading)
        await run(engine)
        assert [request["model"] for request in fake.requests] == ["the-base", zeros]


async def test_a_refused_adapter_is_unloaded_everywhere(model: str, tmp_path: Path) -> None:
    async with engine_of(model, one := FakeVllm(), two := FakeVllm(), device="cuda") as engine:
        path = write_adapter(tmp_path / "refused")
        with pytest.raises(AdapterError, match="adapter 'm@1': vLLM: no such target module"):
            await engine.load_adapter("m@1", path)
        assert one.adapters == two.adapters == {}
        with pytest.raises(NotFoundError):
            await run(engine, adapter="m@1")


async def test_a_server_that_has_lost_an_adapter_gets_it_again(model: str, tmp_path: Path) -> None:
    async with engine_of(model, fake := FakeVllm(), device="cuda") as engine:
        await engine.load_adapter("m@1", write_adapter(tmp_path / "a"))
        for call in (run(engine, adapter="m@1"), run(engine, adapter="m@1", stream=True), engine.score([1, 2], "m@1")):
            fake.adapters.clear()
            await call
            assert len(fake.adapters) == 1


async def test_replicas_share_requests_and_keep_conversations(model: str, tmp_path: Path) -> None:
    fakes = [FakeVllm(), FakeVllm()]
    async with engine_of(model, *fakes, device="cuda", max_running=1) as engine:
        await engine.load_adapter("m@1", write_adapter(tmp_path / "a"))
        assert all(len(fake.adapters) == 1 for fake in fakes)
        for fake in fakes:
            fake.gate.clear()
        crowd = [asyncio.ensure_future(run(engine, adapter="m@1", seed=i)) for i in range(20)]
        await until(lambda: sum(fake.num_running for fake in fakes) == 20)
        assert [fake.num_running for fake in fakes] == [10, 10]
        for fake in fakes:
            fake.gate.set()
        await asyncio.gather(*crowd)
        for fake in fakes:
            fake.requests.clear()
        for turn in range(1, 4):  # one conversation, with requests of others between its turns
            await run(engine, prompt_token_ids=[*range(16 * turn)], max_tokens=1)
            await run(engine, prompt_token_ids=[50 + turn] * 40, max_tokens=1)
        turns = [[len(r["prompt"]) for r in fake.requests if r["prompt"][:2] == [0, 1]] for fake in fakes]
        assert [32, 48] in [lengths[-2:] for lengths in turns]
        stats = await engine.stats()
        assert (stats["generated_tokens"], stats["running"], stats["waiting"]) == (24.0, 2.0, 4.0)
        assert (stats["prefill_tokens"], stats["cached_tokens"], stats["kv_cache_usage"]) == (40.0, 20.0, 0.5)


async def test_a_replica_that_does_not_answer_is_avoided(model: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    async with FakeVllm().serve() as first, AsyncExitStack() as second:
        urls = (first, await second.enter_async_context(FakeVllm().serve()))
        engine, _ = await start_engine(StartVllm(model=model, config=VllmConfig(urls=urls, device="cuda"), lora_rank=4))
        await engine.load_adapter("m@1", path)
        await second.aclose()
        lost = 0
        for seed in range(8):
            try:
                await run(engine, adapter="m@1", prompt_token_ids=[seed] * 40)
            except ProcessError:  # its caller asks again
                lost += 1
        assert lost <= 1
        await engine.load_adapter("m@2", path)
        await run(engine, adapter="m@2")
        await engine.close()


async def test_replicas_that_disagree_are_refused(model: str, tmp_path: Path) -> None:
    async with engine_of(model, one := FakeVllm(), two := FakeVllm(), device="cuda") as engine:
        two.adapters["another's"] = "..."  # shifts the log-probs of what comes after it
        with pytest.raises(AdapterError, match=r"differ from those of .* by 0\.1 nats"):
            await engine.load_adapter("m@1", write_adapter(tmp_path / "a"))
        assert (len(one.adapters), len(two.adapters)) == (0, 1)


async def test_a_cancelled_request_closes_its_connection(model: str) -> None:
    async with engine_of(model, fake := FakeVllm(), max_running=2) as engine:
        fake.gate.clear()
        running = [asyncio.ensure_future(run(engine, seed=i)) for i in range(3)]
        await until(lambda: fake.num_running == 3)
        running[0].cancel()
        await until(lambda: fake.num_running == 2)
        fake.gate.set()
        await asyncio.gather(*running[1:])


async def test_closing_a_stream_closes_the_connection(model: str) -> None:
    async with engine_of(model, fake := FakeVllm()) as engine:
        async with aclosing(engine.generate(ask(max_tokens=40), stream=True)) as chunks:
            await anext(chunks)
        await until(lambda: fake.num_running == 0)


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (400, "This model's maximum context length is 64 tokens", ContextLengthError),
        (400, "token_id(s) [500] are out of vocabulary", InvalidRequestError),
        (401, "Unauthorized", ConfigError),
        (404, "The model `x` does not exist.", NotFoundError),
        (500, "EngineCore encountered an issue", ProcessError),
        (503, "overloaded", ProcessError),
    ],
)
async def test_errors_of_vllm_are_translated(model: str, status: int, message: str, error: type[ArtError]) -> None:
    async with engine_of(model, fake := FakeVllm()) as engine:
        fake.refuse = status, message
        for stream in (False, True):
            with pytest.raises(error) as caught:
                await run(engine, stream=stream)
            assert type(caught.value) is error
            assert message in str(caught.value)


async def test_an_unreachable_server_is_reported(model: str) -> None:
    config = VllmConfig(urls=("http://127.0.0.1:9",))
    with pytest.raises(ProcessError, match=r"127\.0\.0\.1:9"):
        await start_engine(StartVllm(model=model, config=config, lora_rank=4))


async def test_a_server_with_log_probs_before_temperature_is_refused(model: str) -> None:
    fake = FakeVllm()
    fake.processes_logprobs = False
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        async with engine_of(model, fake):
            pass


async def test_a_context_longer_than_the_servers_allow_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=f"{CONTEXT}"):
        async with engine_of(model, FakeVllm(), max_context=CONTEXT):
            pass


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_vllm_says_where_the_time_went_if_it_was_asked_to(model: str) -> None:
    async with engine_of(model, fake := FakeVllm()) as engine:
        assert (await run(engine))[-1].timings is None
        fake.tells_times = True
        for stream in (False, True):
            assert (await run(engine, stream=stream))[-1].timings == Timings(queue_s=0.005, prefill_s=0.02)


async def test_a_stream_is_joined_to_the_chunks_that_were_asked_for(model: str) -> None:
    async with engine_of(model, FakeVllm()) as engine:
        first, last = await run(engine, stream=True, max_tokens=5, num_top_logprobs=1, chunk_every_s=60.0)
        assert (first.token_ids, last.token_ids) == ([9], [10, 11, 12, 13])
        assert last.logprobs == [-1.0] * 4
        assert [len(top) for top in last.top_logprobs] == [1] * 4
        assert (last.finish_reason, last.num_cached_tokens) == ("length", 3)
