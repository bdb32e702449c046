"""The real vLLM through the whole stack; needs ART_VLLM_PYTHON, see `make test-vllm`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from art.config import LoraConfig, ModelSettings, ServerConfig, VllmConfig
from art.engine import GenerateRequest
from art.engines.vllm.command import MODEL_NAME
from art.engines.vllm.replica import Replica
from art.engines.vllm.vllm_engine import VllmEngine
from art.errors import HandshakeError
from art.protocol.training import RegisterRequest
from art.runtime.publish import publish
from art.runtime.runtime import Runtime
from art.testing.tiny_model import build_tiny_model
from tests.support.processes import children_of, wait_until_gone
from tests.support.vllm import NEEDS_VLLM, complete, train

pytestmark = NEEDS_VLLM


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    """With a model `p/agent` that vLLM samples from, and sleeps while it is trained."""
    base = build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", task="yes_no_maybe", head_dim=32)
    runtime = Runtime(tmp_path_factory.mktemp("data"), ServerConfig())
    await runtime.start()
    settings = ModelSettings(lora=LoraConfig(rank=8), engine=VllmConfig(device="cpu", sleep="always"))
    await runtime.registration.register(
        RegisterRequest(project="p", name="agent", base_model=str(base), settings=settings)
    )
    yield runtime
    await runtime.close()


async def test_a_step_is_trained_published_and_sampled_from(runtime: Runtime) -> None:
    for number in range(1, 3):
        status = await train(runtime, "agent", f"vllm-job-{number}")
        assert (status.state, status.step) == ("succeeded", number), status.error
        assert status.metrics["publish/probe_gap"] < 1e-4
        assert status.metrics["publish/probe_effect"] > 1e-3
        # Sampled log-probs are those of the policy that the trainer starts from.
        assert status.metrics["offpolicy/first_update_kl"] < 1e-7
    assert (await complete(runtime, "p/agent"))["policy_version"] == 2


async def test_a_request_survives_the_death_of_any_process_of_the_server(runtime: Runtime) -> None:
    (host,) = runtime._hosts._hosts.values()
    assert host.engine_process.pid is not None
    tree = descendants(host.engine_process.pid)
    assert len(tree) >= 4  # guard, API server, engine, worker
    victim = tree[-1]
    request = GenerateRequest(
        request_id="r", adapter="p/agent@0", prompt_token_ids=[1, 2, 3], max_tokens=400, stop_token_ids=(), seed=1
    )
    tokens: list[int] = []
    async for chunk in host.engine.generate(request, stream=True):
        if not tokens:
            os.kill(victim, signal.SIGKILL)
        tokens += chunk.token_ids
    assert len(tokens) == 400
    assert host.engine_process.num_restarts == 1
    await asyncio.to_thread(wait_until_gone, tree)
    scored = await host.engine.score([1, 2, 3, *tokens], "p/agent@0")
    assert len(scored) == 402


async def test_an_engine_that_dies_asleep_comes_back_awake(runtime: Runtime) -> None:
    (host,) = runtime._hosts._hosts.values()
    before = host.engine_process.num_restarts
    async with host.engine.asleep():
        held = asyncio.create_task(complete(runtime, "p/agent"))
        assert host.engine_process.pid is not None
        os.kill(descendants(host.engine_process.pid)[-1], signal.SIGKILL)
        async with asyncio.timeout(60):
            while host.engine_process.num_restarts == before:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        assert host.engine_process.pid is None, "the trainer has its memory"
        assert not held.done()
    assert len((await held)["choices"]) == 32


async def test_the_handshake_catches_an_adapter_on_base_requests(runtime: Runtime) -> None:
    """What vLLM does on CPU, and what the adapter of zeros is against: a client that takes it for a GPU has none."""
    (host,) = runtime._hosts._hosts.values()
    assert host.engine_process.pid is not None
    guard, *_ = descendants(host.engine_process.pid)
    socket = Path(command_line(guard)[-1].removeprefix("--uds="))
    replica = Replica("http://vllm", environment(guard)["VLLM_API_KEY"], socket)
    info = replace(await host.engine_info(), device="cuda")
    engine = VllmEngine([replica], MODEL_NAME, info)
    checkpoint = runtime.data_dir.model("p", "agent").checkpoint(1)
    try:
        for number in range(VllmConfig().max_loras):
            await engine.load_adapter(f"other@{number}", checkpoint)
            await engine.score([1, 2, 3], f"other@{number}")
        with pytest.raises(HandshakeError, match="share a batch"):
            await publish(engine, "agent@1", checkpoint)
    finally:
        await engine.close()


def descendants(pid: int) -> list[int]:
    """Parents before their children."""
    found = children_of(pid)
    for child in found:
        found += children_of(child)
    return found


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
