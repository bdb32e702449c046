"""vLLM with whole weights instead of adapters, through the whole stack; needs ART_VLLM_PYTHON, see `make test-vllm`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from art.config import LoraConfig, ModelSettings, ServerConfig, TrainerConfig, VllmConfig
from art.engine import GenerateRequest, TokenChunk
from art.errors import HandshakeError, NotFoundError
from art.protocol.training import RegisterRequest
from art.runtime.hosting.host import BaseModelHost
from art.runtime.runtime import Runtime
from art.storage import checkpoints
from art.testing.tiny_model import build_tiny_model
from tests.support.processes import children_of
from tests.support.vllm import NEEDS_VLLM, complete, train

pytestmark = NEEDS_VLLM
MERGED = VllmConfig(device="cpu", weights="merged")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", task="yes_no_maybe", head_dim=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory, base: Path) -> AsyncIterator[Runtime]:
    """With a model `p/agent` whose steps take each other's place in vLLM."""
    runtime = Runtime(tmp_path_factory.mktemp("data"), ServerConfig())
    await runtime.start()
    settings = ModelSettings(lora=LoraConfig(rank=8), engine=MERGED)
    await runtime.registration.register(
        RegisterRequest(project="p", name="agent", base_model=str(base), settings=settings)
    )
    yield runtime
    await runtime.close()


async def test_a_step_takes_the_place_of_the_one_before(runtime: Runtime) -> None:
    host = host_of(runtime, "agent")
    before = await host.engine.score([1, 2, 3] * 40, "p/agent@0")
    prompt = [5, 6, 7] * 40  # several blocks of the prefix cache
    assert (await sample(host, "p/agent@0", prompt, 1)).num_cached_tokens == 0
    assert (await sample(host, "p/agent@0", prompt, 2)).num_cached_tokens > 0
    for number in range(1, 3):
        status = await train(runtime, "agent", f"merged-{number}")
        assert (status.state, status.step) == ("succeeded", number), status.error
        assert status.metrics["publish/probe_gap"] < 1e-4
        assert status.metrics["publish/probe_effect"] > 1e-3
        assert status.metrics["offpolicy/first_update_kl"] < 1e-7
    assert (await complete(runtime, "p/agent"))["policy_version"] == 2
    after = await host.engine.score([1, 2, 3] * 40, "p/agent@2")
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3
    again = await sample(host, "p/agent@2", prompt, 1)
    assert again.num_cached_tokens == 0, "keys and values of the policy before"
    scored = await host.engine.score(prompt + again.token_ids, "p/agent@2")
    assert again.logprobs == pytest.approx(scored[len(prompt) - 1 :], abs=1e-4)
    assert not any(runtime.data_dir.merged(host.name).parent.iterdir())
    for name in ("p/agent@1", "agent@0"):
        with pytest.raises(NotFoundError, match="one step at a time, now step 2"):
            await complete(runtime, name)


async def test_vllm_agrees_with_transformers(runtime: Runtime, base: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    step = runtime.data_dir.model("p", "agent").checkpoint(2)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), step)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 5
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]
    assert await host_of(runtime, "agent").engine.score(tokens, "p/agent@2") == pytest.approx(expected, abs=1e-4)


async def test_requests_that_come_during_a_publish_wait_for_its_end(runtime: Runtime) -> None:
    host = host_of(runtime, "agent")
    running = asyncio.create_task(sample(host, "p/agent@2", [1, 2, 3], 3, max_tokens=400))
    while not host.engine.in_use["p/agent@2"]:
        await asyncio.sleep(0.01)
    paths = runtime.data_dir.model("p", "agent")
    publishing = asyncio.create_task(host.adapters.load("p/agent@1", paths.checkpoint(1)))
    while not host.engine.closed.lasts:
        await asyncio.sleep(0.01)
    held = [asyncio.create_task(complete(runtime, "p/agent")) for _ in range(3)]
    old = await running
    assert not any(request.done() for request in held)
    await publishing
    assert len(old.token_ids) == 400
    answers = await asyncio.gather(*held)
    assert {answer["policy_version"] for answer in answers} == {1}
    exchange = next(iter(answers[0]["choices"]))["exchange_id"]
    (recorded,) = runtime.gateway.recorder.find([exchange]).values()
    scored = await host.engine.score(recorded.prompt_token_ids + recorded.completion_token_ids, "p/agent@1")
    assert recorded.sampling_logprobs == pytest.approx(scored[len(recorded.prompt_token_ids) - 1 :], abs=1e-4)
    assert recorded.policy_version == 1
    await host.adapters.load("p/agent@2", paths.checkpoint(2))
    scored = await host.engine.score([1, 2, 3, *old.token_ids], "p/agent@2")
    assert old.logprobs == pytest.approx(scored[2:], abs=1e-4)  # all of it is of the policy that it began with


async def test_the_policy_before_comes_back_if_the_handshake_fails(runtime: Runtime) -> None:
    host, paths = host_of(runtime, "agent"), runtime.data_dir.model("p", "agent")
    wrong = paths.checkpoint(9)
    files = {entry: (paths.checkpoint(1) / entry).read_bytes() for entry in checkpoints.list_files(paths.checkpoint(1))}
    checkpoints.write_checkpoint(wrong, files | {checkpoints.PROBE: (paths.checkpoint(2) / "probe.json").read_bytes()})
    with pytest.raises(HandshakeError, match="at most"):
        await host.adapters.load("p/agent@9", wrong)
    checkpoints.delete(wrong)
    assert (await complete(runtime, "p/agent"))["policy_version"] == 2
    assert host.engine_process.num_restarts == 0


async def test_the_published_step_is_there_after_a_death(runtime: Runtime) -> None:
    host = host_of(runtime, "agent")
    adapter = f"p/agent@{(await runtime.models.status('p', 'agent')).step}"
    before = await host.engine.score([1, 2, 3], adapter)
    chunks, killed = [], False
    async for chunk in host.engine.generate(ask(adapter, [1, 2, 3], 4, max_tokens=400), stream=True):
        if not killed:
            assert host.engine_process.pid is not None
            os.kill(children_of(host.engine_process.pid)[0], signal.SIGKILL)
            killed = True
        chunks.append(chunk)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    assert (len(tokens), host.engine_process.num_restarts) == (400, 1)
    assert await host.engine.score([1, 2, 3], adapter) == pytest.approx(before, abs=1e-5)
    scored = await host.engine.score([1, 2, 3, *tokens], adapter)
    assert logprobs == pytest.approx(scored[2:], abs=1e-4)


async def test_full_fine_tuning(runtime: Runtime, base: Path) -> None:
    """Beside the other model of this base, in a server of its own."""
    settings = ModelSettings(lora=None, engine=MERGED, trainer=TrainerConfig(device="cpu"))
    await runtime.registration.register(
        RegisterRequest(project="p", name="full", base_model=str(base), settings=settings)
    )
    status = await train(runtime, "full", "merged-full-1", learning_rate=1e-4)
    assert (status.state, status.step) == ("succeeded", 1), status.error
    assert status.metrics["publish/probe_gap"] < 1e-4
    assert "publish/adapter_norm" not in status.metrics  # vLLM cannot say what it holds
    assert (await complete(runtime, "p/full"))["policy_version"] == 1
    others_step = (await runtime.models.status("p", "agent")).step
    assert (await complete(runtime, "p/agent"))["policy_version"] == others_step


def host_of(runtime: Runtime, name: str) -> BaseModelHost:
    return runtime.models.find("p", name)[1]


def ask(adapter: str, prompt: list[int], seed: int, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", adapter=adapter, prompt_token_ids=prompt, max_tokens=max_tokens, stop_token_ids=(), seed=seed
    )


async def sample(host: BaseModelHost, adapter: str, prompt: list[int], seed: int, max_tokens: int = 8) -> TokenChunk:
    (chunk,) = [chunk async for chunk in host.engine.generate(ask(adapter, prompt, seed, max_tokens), stream=False)]
    return chunk
