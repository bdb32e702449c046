"""Grammars on vLLM: which servers get them, what they are sent, and answers that leave their grammar."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from art.config import VllmConfig
from art.engine import EngineInfo, GenerateRequest, TokenChunk
from art.engines.vllm.command import Installation, server_command
from art.engines.vllm.grammars import vocabulary_for
from art.engines.vllm.start import start_engine
from art.engines.vllm.vllm_engine import VllmEngine
from art.errors import ConfigError, InvalidRequestError, OverloadedError
from art.kernels.grammar import Vocabulary, with_end
from art.protocol.calls import StartVllm
from tests.support.fake_vllm import VOCAB_OF_GRAMMARS, FakeVllm
from tests.support.grammars import GRAMMAR, STOPS, check_answer, make_tokenizer, save_tokenizer

VERSION = importlib.metadata.version("llguidance")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    settings = {"vocab_size": VOCAB_OF_GRAMMARS, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_tokenizer(tmp_path)
    return tmp_path


def server() -> FakeVllm:
    fake = FakeVllm()
    fake.vocabulary = Vocabulary(make_tokenizer().to_str(), VOCAB_OF_GRAMMARS)
    return fake


@asynccontextmanager
async def connected(model: Path, fake: FakeVllm) -> AsyncIterator[VllmEngine]:
    async with fake.serve() as url:
        config = VllmConfig.model_validate({"urls": [url], "device": "cpu", "dtype": "float32"})
        engine, _ = await start_engine(StartVllm(model=str(model), config=config, lora_rank=4))
        fake.requests.clear()
        try:
            yield engine
        finally:
            await engine.close()


def ask(**fields: Any) -> GenerateRequest:
    defaults = {
        "request_id": "r", "adapter": None, "prompt_token_ids": [7, 8], "max_tokens": 40, "stop_token_ids": STOPS,
        "seed": 1, "grammar": GRAMMAR,
    }  # fmt: skip
    return GenerateRequest(**{**defaults, **fields})


async def run(engine: VllmEngine, **fields: Any) -> TokenChunk:
    return [chunk async for chunk in engine.generate(ask(**fields), stream=False)][-1]


async def test_a_server_that_samples_as_art_replays_gets_grammars(model: Path) -> None:
    async with connected(model, fake := server()) as engine:
        info = await engine.info()
        assert info.grammars
        assert not info.reports_kept
        answer = await run(engine, stop_token_ids=(*STOPS, VOCAB_OF_GRAMMARS + 3))
        check_answer(make_tokenizer().decode(answer.token_ids[:-1], skip_special_tokens=False))
        (body,) = fake.requests
        assert body["structured_outputs"] == {"grammar": with_end(GRAMMAR, STOPS)}
        await run(engine, grammar=None, max_tokens=3)
        assert "structured_outputs" not in fake.requests[-1]


def no_tokenizer(fake: FakeVllm) -> None:
    fake.vocabulary = None


def other_masks(fake: FakeVllm) -> None:
    fake.obeys = lambda index: index != 4


def a_mass_above_one(fake: FakeVllm) -> None:
    fake.mass = 1.5


def other_alternatives(fake: FakeVllm) -> None:
    characters = make_tokenizer()
    characters.add_special_tokens(["<more>"])
    changed = json.loads(characters.to_str())
    vocab = changed["model"]["vocab"]
    vocab["t"], vocab["f"] = vocab["f"], vocab["t"]
    fake.vocabulary = Vocabulary(json.dumps(changed), VOCAB_OF_GRAMMARS)


@pytest.mark.parametrize("fault", [no_tokenizer, other_masks, a_mass_above_one, other_alternatives])
async def test_another_server_gets_none_and_the_log_says_why(
    model: Path, caplog: pytest.LogCaptureFixture, fault: Callable[[FakeVllm], None]
) -> None:
    fault(fake := server())
    async with connected(model, fake) as engine:
        assert not (await engine.info()).grammars
        assert "does not sample as ART replays" in caplog.text
        with pytest.raises(InvalidRequestError, match="grammar"):
            await run(engine)
        assert not fake.requests


async def test_an_answer_that_leaves_its_grammar_is_an_error(model: Path) -> None:
    async with connected(model, fake := server()) as engine:
        fake.obeys = lambda index: index < 1
        with pytest.raises(InvalidRequestError, match="cannot be continued at token 1"):
            await run(engine)


async def test_a_grammar_that_is_not_one_never_reaches_the_server(model: Path) -> None:
    async with connected(model, fake := server()) as engine:
        with pytest.raises(InvalidRequestError, match="look-around"):
            await run(engine, grammar="start: /(?=a)b/")
        assert not fake.requests


async def test_an_interrupted_answer_cannot_go_on(model: Path) -> None:
    async with connected(model, server()) as engine:
        with pytest.raises(OverloadedError, match="ask again"):
            await run(engine, first_index=1)


def test_the_server_is_started_with_what_grammars_need() -> None:
    cpu = Installation("python", "0.32.0", "2.13.0+cpu", "cpu", VERSION)
    for grammars in (True, False):
        info = EngineInfo(vocab_size=64, max_context=128, dtype="float32", device="cpu", grammars=grammars)
        command = server_command(cpu, "m", VllmConfig(), info, lora_rank=9)
        assert ('--structured-outputs-config={"backend": "guidance"}' in command) == grammars
        assert ("--skip-tokenizer-init" in command) != grammars


@pytest.mark.parametrize("version", [None, "0.7.30"])
def test_another_release_of_the_library_gets_no_grammars(
    model: Path, caplog: pytest.LogCaptureFixture, version: str | None
) -> None:
    other = Installation("python", "0.32.0", "2.13.0", "cuda", version)
    assert vocabulary_for(str(model), VOCAB_OF_GRAMMARS, other) is None
    assert "install the same release" in caplog.text
    same = Installation("python", "0.32.0", "2.13.0", "cuda", VERSION)
    assert vocabulary_for(str(model), VOCAB_OF_GRAMMARS, same) is not None


@pytest.mark.parametrize("flag", ["structured_outputs_config", "--structured-outputs-config.backend"])
def test_the_backend_of_grammars_is_not_the_user_s_to_choose(flag: str) -> None:
    with pytest.raises(ConfigError, match="which tokens a grammar allows"):
        VllmConfig(flags={flag: "xgrammar"})
