"""The exports for production servers, in a vLLM that ART neither starts nor knows of: it computes what ART's own engine does.

Needs ART_VLLM_PYTHON, see `make test-vllm`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
import uvicorn

from art.config import LoraConfig, ModelSettings, ServerConfig
from art.config.server import RenderConfig
from art.protocol.chat_completions import parse_chat_request
from art.protocol.promotions import PromoteRequest
from art.protocol.training import RegisterRequest
from art.runtime.hosting.host import BaseModelHost
from art.runtime.runtime import Runtime
from art.server.app import App
from art.testing.tiny_model import build_tiny_model
from tests.support.stock_vllm import serve_stock
from tests.support.vllm import NEEDS_VLLM, PROMPT, train

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]
KEY = "key"
NAME = "p/agent@promoted"
CLOSE = 1e-4
"""Nats. Both compute in float32 and sum in other orders, which makes 1e-6 to 1e-5 of difference here."""
FAR = 1e-2
"""Nats. Training moves the log-probs of some tokens by more than this."""
NO_THINKING = {"enable_thinking": False}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 5
LONG = [5, 6, 7] * 100
"""Several blocks of 128 tokens, the unit in which vLLM reuses prompts on CPU."""


@dataclass
class Trained:
    """A model with a rank above vLLM's default of 16 and every linear layer, after two steps."""

    runtime: Runtime
    base: Path
    url: str

    @property
    def host(self) -> BaseModelHost:
        return self.runtime.models.find("p", "agent")[1]

    async def score(self, tokens: list[int], step: int) -> list[float]:
        """Score all tokens but the first with ART's own engine."""
        return await self.host.engine.score(tokens, f"p/agent@{step}")

    async def promote(self, step: int) -> None:
        await self.runtime.promotions.promote("p", "agent", PromoteRequest(step=step), "key")

    async def export(self, form: str, step: int, path: Path) -> str:
        """Run `art checkpoints export` and return what it prints."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "art.cli.main", "checkpoints", "export", "p/agent", form, "--step", str(step),
            "--path", str(path), stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"ART_SERVER_URL": self.url, "ART_API_KEY": KEY},
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, output
        return output.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trained]:
    base = build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", task="yes_no_maybe", head_dim=32)
    runtime = Runtime(tmp_path_factory.mktemp("data"), ServerConfig())
    await runtime.start()
    settings = ModelSettings(
        lora=LoraConfig(rank=24, alpha=8 * 24**0.5), render=RenderConfig(chat_template_kwargs=NO_THINKING)
    )
    await runtime.registration.register(
        RegisterRequest(project="p", name="agent", base_model=str(base), settings=settings)
    )
    for step in (1, 2):
        status = await train(runtime, "agent", f"handover-{step}", learning_rate=2e-2)
        assert (status.state, status.step) == ("succeeded", step), status.error
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(App(runtime, api_key=KEY), log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve([listener]))
    yield Trained(runtime, base, f"http://127.0.0.1:{listener.getsockname()[1]}")
    server.should_exit = True
    await serving
    await runtime.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def promoted(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], str]:
    """Exports of steps 1 and 2, each made while its step was the promoted one, and the command that serves the first."""
    folders, printed = [], []
    for step in (1, 2):
        await trained.promote(step)
        folders.append(tmp_path_factory.mktemp("export") / f"agent-{step}")
        printed.append(await trained.export("vllm-lora", step, folders[-1]))
    (command,) = [line.removeprefix("vllm: ") for line in printed[0].splitlines() if line.startswith("vllm: ")]
    return folders, command


@pytest.fixture(scope="module")
def stock(promoted: tuple[list[Path], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command as it was printed, with leave to load adapters later."""
    scratch = tmp_path_factory.mktemp("vllm")
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with serve_stock(promoted[1], scratch, scratch=scratch, environment=environment) as url:
        yield url


async def test_every_token_has_the_log_prob_of_arts_engine(trained: Trained, stock: str) -> None:
    theirs = await prompt_logprobs(stock, NAME, TOKENS)
    assert theirs == pytest.approx(await trained.score(TOKENS, 1), abs=CLOSE)
    assert gap(theirs, await prompt_logprobs(stock, str(trained.base), TOKENS)) > FAR
    assert gap(theirs, await trained.score(TOKENS, 2)) > FAR


async def test_a_client_changes_its_base_url_and_nothing_else(trained: Trained, stock: str) -> None:
    await trained.promote(1)
    request = {"model": NAME, "messages": [PROMPT], "temperature": 0, "max_tokens": 8, "logprobs": True}
    answers = []
    for url in (trained.url, stock):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
            answers.append((await client.chat.completions.create(**request)).choices[0])  # type: ignore[call-overload]
    ours, theirs = ([(one.token, one.logprob) for one in answer.logprobs.content] for answer in answers)
    assert answers[0].message.content == answers[1].message.content
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert [logprob for _, logprob in ours] == pytest.approx([logprob for _, logprob in theirs], abs=CLOSE)


async def test_prompts_are_rendered_as_in_training(trained: Trained, stock: str) -> None:
    """The template's arguments come from the printed command, or from requests as README.md describes them."""
    chat = parse_chat_request({"model": "p/agent", "messages": [PROMPT], "chat_template_kwargs": NO_THINKING})
    ours = await trained.runtime.gateway.prompt_token_ids(chat)
    assert await rendered(stock) == ours
    assert await rendered(stock, chat_template_kwargs=NO_THINKING) == ours
    assert await rendered(stock, chat_template_kwargs={"enable_thinking": True}) != ours


async def test_the_next_checkpoint_takes_its_place_without_a_restart(
    trained: Trained, stock: str, promoted: tuple[list[Path], str]
) -> None:
    await compare_samples(trained, stock, 1)
    hits = await cache_hits(stock)
    await compare_samples(trained, stock, 1)
    assert await cache_hits(stock) > hits
    missing = {"lora_name": NAME, "lora_path": str(promoted[0][1] / "missing"), "load_inplace": True}
    async with httpx2.AsyncClient(base_url=stock, timeout=300) as client:
        assert (await client.post("/v1/load_lora_adapter", json=missing)).status_code == 404
        await compare_samples(trained, stock, 1)
        body = missing | {"lora_path": str(promoted[0][1])}
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    await compare_samples(trained, stock, 2)  # not with the keys and values that the cache has of step 1
    assert await prompt_logprobs(stock, NAME, TOKENS) == pytest.approx(await trained.score(TOKENS, 2), abs=CLOSE)


async def test_the_merged_model_is_served_as_it_is(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    await trained.export("merged", 2, folder)
    with serve_stock(f"vllm serve {folder}", tmp_path, scratch=tmp_path) as url:
        theirs = await prompt_logprobs(url, str(folder), TOKENS)
    assert theirs == pytest.approx(await trained.score(TOKENS, 2), abs=CLOSE)


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


async def ask(url: str, path: str, **body: Any) -> Any:
    async with httpx2.AsyncClient(base_url=url, timeout=300) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


async def prompt_logprobs(url: str, model: str, tokens: list[int]) -> list[float]:
    answer = await ask(url, "/v1/completions", model=model, prompt=tokens, max_tokens=1, prompt_logprobs=0)
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    return [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries, strict=True)]


async def rendered(url: str, **fields: Any) -> list[int]:
    answer = await ask(
        url, "/v1/chat/completions", model=NAME, messages=[PROMPT], max_tokens=1, return_token_ids=True, **fields
    )
    return list(answer["prompt_token_ids"])


async def compare_samples(trained: Trained, url: str, step: int) -> None:
    """Let vLLM answer a long prompt, and score its answer with ART's own engine."""
    fields = {"max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    answer = (await ask(url, "/v1/completions", model=NAME, prompt=LONG, **fields))["choices"][0]
    path = LONG + answer["token_ids"]
    ours, others = [(await trained.score(path, one))[len(LONG) - 1 :] for one in (step, 3 - step)]
    assert answer["logprobs"]["token_logprobs"] == pytest.approx(ours, abs=CLOSE)
    assert gap(ours, others) > FAR


async def cache_hits(url: str) -> float:
    """The number of prompt tokens that vLLM has taken from its cache."""
    async with httpx2.AsyncClient(base_url=url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))
