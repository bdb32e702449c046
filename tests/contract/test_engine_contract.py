"""What every engine must do, whatever it is made of.

The vLLM part needs the interpreter of an environment with vLLM in ART_VLLM_PYTHON, or vLLM beside ART; `make test-vllm`
makes one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save_file

from art.config import EngineConfig, VllmConfig
from art.engine import Engine, GenerateRequest, SleepingEngine, TokenChunk
from art.engines.vllm.command import installed_vllm_python
from art.errors import (
    AdapterError,
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from art.kernels.grammar import Vocabulary, allowed_ids
from art.protocol.calls import StartEngine, StartVllm
from art.protocol.rpc import RpcClient
from art.runtime.hosting.process_engine import ProcessEngine
from tests.support.fake_engine import FakeEngine
from tests.support.grammars import GRAMMAR, STOPS, check_answer, make_tokenizer, save_tokenizer

VOCAB, HIDDEN, CONTEXT, RUNNING, WAITING = 128, 32, 256, 4, 4
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["fake", "embedded", "vllm"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    if request.param == "fake":
        yield FakeEngine(
            vocab_size=VOCAB, max_context=CONTEXT, max_running=RUNNING, delay_s=0.0002,
            tokenizer_json=make_tokenizer().to_str(),
        )  # fmt: skip
        return
    settings = {"device": "cpu", "num_threads": 1, "max_running": RUNNING}
    model = str(request.getfixturevalue("base_model"))
    module: str = "engine_child"
    start: StartEngine | StartVllm = StartEngine(model=model, config=EngineConfig.model_validate(settings))
    if request.param == "vllm":
        if installed_vllm_python() is None:
            pytest.skip("vLLM is not installed: `make test-vllm`, or ART_VLLM_PYTHON=<interpreter that has it>")
        config = VllmConfig.model_validate(settings)
        module = "vllm_child"
        start = StartVllm(model=model, config=config, lora_rank=4, sleeps=True)
    ours, theirs = socket.socketpair()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"art.worker.{module}", "--fd", str(theirs.fileno())),
        pass_fds=[theirs.fileno()],
        env=environment,
    )
    theirs.close()
    client = await RpcClient(lambda status: None).connect(ours)
    await client.call(start)

    async def connect() -> RpcClient:
        return client

    yield ProcessEngine(connect, attempts=4)
    await client.close()
    await asyncio.wait_for(process.wait(), 10)  # it leaves when its connection ends


def write_adapter(folder: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in range(2):
        key = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        weights[f"{key}.lora_A.weight"] = rng.normal(0, 0.5, (4, 48)).astype(np.float32)
        weights[f"{key}.lora_B.weight"] = rng.normal(0, 0.5, (HIDDEN, 4)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def ask(seed: int = 1, **fields: object) -> GenerateRequest:
    defaults = {
        "request_id": f"r{seed}",
        "adapter": None,
        "prompt_token_ids": [3, 1, 4, 1, 5],
        "max_tokens": 20,
        "stop_token_ids": (),
    }
    return GenerateRequest(**{**defaults, **fields, "seed": seed})


async def run(engine: Engine, request: GenerateRequest, *, stream: bool = False) -> TokenChunk:
    """All chunks as one."""
    chunks = [chunk async for chunk in engine.generate(request, stream=stream)]
    assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) == 1 or stream
    whole = TokenChunk(
        token_ids=[t for c in chunks for t in c.token_ids],
        logprobs=[lp for c in chunks for lp in c.logprobs],
        top_logprobs=[top for c in chunks for top in c.top_logprobs],
        kept=[kept for c in chunks for kept in c.kept or [[]] * len(c.token_ids)],
        finish_reason=chunks[-1].finish_reason,
        num_cached_tokens=chunks[-1].num_cached_tokens,
    )
    assert len(whole.token_ids) == len(whole.logprobs)
    return whole


async def settled(engine: Engine) -> dict[str, float]:
    """Statistics once no request is left."""
    async with asyncio.timeout(60):
        while (stats := await engine.stats())["running"] + stats["waiting"]:
            await asyncio.sleep(0.01)
    return stats


async def test_info(engine: Engine) -> None:
    info = await engine.info()
    assert (info.vocab_size, info.max_context, info.dtype, info.device) == (VOCAB, CONTEXT, "float32", "cpu")


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(engine: Engine) -> None:
    requests = [ask(seed, prompt_token_ids=[seed % 3, 7, 7], temperature=1.0 + seed % 2) for seed in range(8)]
    crowd = await asyncio.gather(*(run(engine, r) for r in requests))
    for request, together in zip(requests, crowd, strict=True):
        alone = await run(engine, request)
        assert alone.token_ids == together.token_ids
        assert alone.logprobs == pytest.approx(together.logprobs, abs=1e-4)
    assert len({tuple(c.token_ids) for c in crowd}) == 8


async def test_a_resumed_request_goes_on(engine: Engine) -> None:
    """With the same tokens where the engine promises that, else with others of the right distribution."""
    request = ask(5)
    whole = await run(engine, request)
    for cut in (1, 7, 19):
        prompt = request.prompt_token_ids + whole.token_ids[:cut]
        resumed = replace(request, prompt_token_ids=prompt, max_tokens=20 - cut, first_index=cut)
        rest = await run(engine, resumed)
        if (await engine.info()).draws_by_index:
            assert rest.token_ids == whole.token_ids[cut:]
            assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)
        else:
            scored = await engine.score(prompt + rest.token_ids, None)
            assert rest.logprobs == pytest.approx(scored[len(prompt) - 1 :], abs=1e-4)
            assert (await run(engine, resumed)).token_ids == rest.token_ids
            assert rest.token_ids != (await run(engine, replace(resumed, first_index=0))).token_ids


async def test_a_stream_has_the_tokens_of_a_plain_answer(engine: Engine) -> None:
    request = ask(6, num_top_logprobs=2)
    streamed, plain = await run(engine, request, stream=True), await run(engine, request)
    assert streamed.token_ids == plain.token_ids
    assert streamed.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert [[t for t, _ in top] for top in streamed.top_logprobs] == [[t for t, _ in top] for top in plain.top_logprobs]
    async with aclosing(engine.generate(request, stream=True)) as chunks:
        assert len((await anext(chunks)).token_ids) < 20


async def test_a_stream_comes_in_chunks_as_large_as_the_request_says(engine: Engine) -> None:
    request = ask(11)
    plain = await run(engine, request)
    chunks = [chunk async for chunk in engine.generate(replace(request, chunk_every_s=60.0), stream=True)]
    assert len(chunks) == 2
    assert len(chunks[0].token_ids) < 20  # the first tokens come at once
    assert [token for chunk in chunks for token in chunk.token_ids] == plain.token_ids
    assert [lp for chunk in chunks for lp in chunk.logprobs] == pytest.approx(plain.logprobs, abs=1e-4)
    with pytest.raises(InvalidRequestError, match="chunk_every_s"):
        await run(engine, replace(request, chunk_every_s=-1.0))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_chunk_says_where_the_time_went(engine: Engine, stream: bool) -> None:
    started = time.perf_counter()
    chunks = [chunk async for chunk in engine.generate(ask(12), stream=stream)]
    wall_s = time.perf_counter() - started
    timings = chunks[-1].timings
    assert timings is not None
    parts = (timings.queue_s, timings.prefill_s, timings.decode_s)
    assert None not in parts
    assert min(parts) >= 0
    assert 0 < timings.decode_s < sum(parts) <= wall_s + 0.001
    if stream and (early := chunks[0].timings) is not None:
        assert early == replace(timings, decode_s=None)
    assert all(chunk.timings is None for chunk in chunks[1:-1])


async def test_a_request_that_waits_says_for_how_long(engine: Engine) -> None:
    async def queue_s(seed: int) -> float:
        chunks = [c async for c in engine.generate(ask(seed, max_tokens=60), stream=False)]
        timings = chunks[-1].timings
        assert timings is not None
        return timings.queue_s

    waits = sorted(await asyncio.gather(*(queue_s(100 + i) for i in range(2 * RUNNING))))
    alone = min(waits[:RUNNING])
    assert waits[RUNNING] > 10 * alone  # the second half waited until a place was free


async def test_stop_tokens_end_a_completion_and_belong_to_it(engine: Engine) -> None:
    whole = await run(engine, ask(7))
    stop = whole.token_ids[8]
    first = whole.token_ids.index(stop)
    stopped = await run(engine, ask(7, stop_token_ids=(stop, VOCAB + 5)))  # an id that no model has does no harm
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"


async def test_max_tokens(engine: Engine) -> None:
    for max_tokens in (1, 2, 9):
        result = await run(engine, ask(8, max_tokens=max_tokens))
        assert (len(result.token_ids), result.finish_reason) == (max_tokens, "length")


async def test_the_context_limit(engine: Engine) -> None:
    almost = await run(engine, ask(9, prompt_token_ids=[1] * (CONTEXT - 3)))
    assert (len(almost.token_ids), almost.finish_reason) == (3, "length")
    with pytest.raises(ContextLengthError, match=str(CONTEXT)):
        await run(engine, ask(9, prompt_token_ids=[1] * CONTEXT))


@pytest.mark.parametrize(
    "fields",
    [{"prompt_token_ids": [VOCAB]}, {"prompt_token_ids": []}, {"temperature": -1.0}, {"max_tokens": 0}],
    ids=str,
)
async def test_bad_requests(engine: Engine, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        await run(engine, ask(1, **fields))


async def test_greedy_ignores_the_seed(engine: Engine) -> None:
    results = [await run(engine, ask(seed, temperature=0.0)) for seed in (1, 2)]
    assert results[0].token_ids == results[1].token_ids


@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_logprobs_are_those_that_score_measures(engine: Engine, temperature: float) -> None:
    request = ask(10, temperature=temperature, num_top_logprobs=3)
    result = await run(engine, request)
    scored = await engine.score(request.prompt_token_ids + result.token_ids, None)
    assert len(scored) == len(request.prompt_token_ids) + 20 - 1
    assert scored[len(request.prompt_token_ids) - 1 :] == pytest.approx(result.logprobs, abs=1e-4)
    for token, logprob, top in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True):
        assert len(top) == 3
        assert [lp for _, lp in top] == sorted((lp for _, lp in top), reverse=True)
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-6)
        assert logprob <= top[0][1] + 1e-6


async def test_a_truncated_distribution_is_renormalised(engine: Engine) -> None:
    plain, nucleus = await run(engine, ask(11)), await run(engine, ask(11, top_p=0.05))
    assert nucleus.logprobs != plain.logprobs
    greedy = await run(engine, ask(11, temperature=0.0))
    assert (await run(engine, ask(11, top_p=1e-6))).token_ids == greedy.token_ids
    assert (await run(engine, ask(11, top_p=1e-6))).logprobs == pytest.approx([0.0] * 20, abs=1e-6)


def in_form(seed: int = 1, **fields: object) -> GenerateRequest:
    """A request whose answer must match `GRAMMAR`."""
    return ask(seed, **{"grammar": GRAMMAR, "stop_token_ids": STOPS, "max_tokens": 60, **fields})


async def distribution(engine: Engine, request: GenerateRequest, drawn: list[int]) -> dict[int, float]:
    """Log-probs of all tokens after `drawn`, as if the request had neither a grammar nor a cut."""
    free = replace(
        request, prompt_token_ids=request.prompt_token_ids + drawn, max_tokens=1, num_top_logprobs=VOCAB,
        grammar=None, top_p=1.0, top_k=0, min_p=0.0,
    )  # fmt: skip
    ((_, *_),) = tops = (await run(engine, free)).top_logprobs
    return dict(tops[0])


def within(logprobs: dict[int, float], allowed: list[int]) -> dict[int, float]:
    """The distribution over `allowed` only."""
    total = math.log(math.fsum(math.exp(logprobs[token]) for token in allowed))
    return {token: logprobs[token] - total for token in allowed}


@pytest_asyncio.fixture(loop_scope="module")
async def former(engine: Engine) -> Engine:
    """An engine that honours grammars, as all of them do."""
    assert (await engine.info()).grammars
    return engine


async def test_answers_match_their_grammar_and_end_only_at_stop_tokens(former: Engine) -> None:
    tokenizer = make_tokenizer()
    seeds = range(12)
    answers = [a for seed in seeds for a in [await run(former, in_form(seed, temperature=0.5 + seed % 3 * 0.75))]]
    assert len({tuple(answer.token_ids) for answer in answers}) > len(seeds) // 2
    for answer in answers:
        assert answer.finish_reason == "stop"
        assert answer.token_ids[-1] in STOPS
        assert not set(answer.token_ids[:-1]) & {0, 1, 2}  # no added token but at the end
        check_answer(tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=False))
    assert {answer.token_ids[-1] for answer in answers} == set(STOPS)
    named = await run(former, in_form(3, grammar='start: <call> "ab"'))
    assert named.token_ids[0] == tokenizer.token_to_id("<call>")
    assert tokenizer.decode(named.token_ids[1:-1], skip_special_tokens=False) == "ab"


@pytest.mark.parametrize("temperature", [1.0, 1.5])
async def test_logprobs_under_a_grammar_are_those_of_what_it_allows(former: Engine, temperature: float) -> None:
    vocabulary = Vocabulary(make_tokenizer().to_str(), VOCAB)
    request = in_form(21, temperature=temperature, num_top_logprobs=4, max_tokens=14)
    answer = await run(former, request)
    replay = vocabulary.replay(GRAMMAR, STOPS, answer.token_ids)
    assert replay.num_matched == len(answer.token_ids)
    for i, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        allowed = allowed_ids(replay.masks[replay.index[i]], VOCAB).tolist()
        want = within(await distribution(former, request, answer.token_ids[:i]), allowed)
        assert logprob == pytest.approx(want[token], abs=2e-4)
        assert dict(answer.top_logprobs[i]).keys() <= set(allowed)
        assert len(answer.top_logprobs[i]) == min(4, len(allowed))
        for other, reported in answer.top_logprobs[i]:
            assert reported == pytest.approx(want[other], abs=2e-4)


async def test_a_resumed_request_goes_on_in_its_grammar(former: Engine) -> None:
    """vLLM cannot go on inside a grammar: it refuses, and the whole answer is asked for again."""
    request = in_form(5)
    whole = await run(former, request)
    if not (await former.info()).draws_by_index:
        prompt = request.prompt_token_ids + whole.token_ids[:4]
        with pytest.raises(OverloadedError, match="ask again"):
            await run(former, replace(request, prompt_token_ids=prompt, max_tokens=56, first_index=4))
        return
    for cut in (1, 4, len(whole.token_ids) - 1):
        prompt = request.prompt_token_ids + whole.token_ids[:cut]
        rest = await run(former, replace(request, prompt_token_ids=prompt, max_tokens=60 - cut, first_index=cut))
        assert rest.token_ids == whole.token_ids[cut:]
        assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)
    strange = replace(request, prompt_token_ids=[*request.prompt_token_ids, 50], first_index=1)
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        await run(former, strange)


async def test_grammars_and_free_answers_share_a_batch(former: Engine) -> None:
    others = ['start: "yes" | "no"', "start: /[0-9]{3,9}/", None, None]
    requests = [in_form(i, grammar=[GRAMMAR, *others][i % 5], max_tokens=20) for i in range(RUNNING + WAITING)]
    crowd = await asyncio.gather(*(run(former, request, stream=i % 2 == 0) for i, request in enumerate(requests)))
    for request, together in zip(requests, crowd, strict=True):
        alone = await run(former, request)
        assert alone.token_ids == together.token_ids
        assert alone.logprobs == pytest.approx(together.logprobs, abs=1e-4)


@pytest.mark.parametrize("grammar", ["start: /(?=a)b/", "start: <no_such_token>", 'start: "a', ""])
async def test_a_grammar_that_is_not_one_fails_alone(former: Engine, grammar: str) -> None:
    good, bad = await asyncio.gather(
        run(former, in_form(4)), run(former, in_form(4, grammar=grammar)), return_exceptions=True
    )
    assert isinstance(bad, InvalidRequestError)
    assert isinstance(good, TokenChunk)
    with pytest.raises(InvalidRequestError, match="stop token"):
        await run(former, in_form(4, stop_token_ids=()))


async def test_what_an_engine_cannot_do_is_refused_by_name(engine: Engine) -> None:
    info = await engine.info()
    settings = {"grammar": (info.grammars, GRAMMAR), "top_k": (info.reports_kept, 3), "min_p": (info.reports_kept, 0.1)}
    for name, (is_honoured, value) in settings.items():
        request = ask(4, stop_token_ids=STOPS, **{name: value})
        if is_honoured:
            await run(engine, request)
        else:
            with pytest.raises(InvalidRequestError, match=name):
                await run(engine, request)


@pytest.mark.parametrize("grammar", [None, GRAMMAR])
@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.9, "min_p": 1e-3}]
)
async def test_what_was_drawn_from_is_reported(engine: Engine, cut: dict[str, float], grammar: str | None) -> None:
    info = await engine.info()
    if not info.reports_kept or (grammar is not None and not info.grammars):
        pytest.skip("this engine does not report it")
    request = in_form(6, grammar=grammar, max_tokens=12, num_top_logprobs=VOCAB, **cut)
    answer = await run(engine, request)
    assert any(answer.kept)
    assert (await run(engine, request, stream=True)).kept == answer.kept
    allowed = None
    if grammar is not None:
        vocabulary = Vocabulary(make_tokenizer().to_str(), VOCAB)
        replay = vocabulary.replay(grammar, STOPS, answer.token_ids)
        allowed = [allowed_ids(replay.masks[k], VOCAB).tolist() for k in replay.index]
    for i, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        possible = allowed[i] if allowed is not None else list(range(VOCAB))
        kept = answer.kept[i] or possible
        assert kept == sorted(kept)
        assert set(kept) <= set(possible)
        assert {t for t, _ in answer.top_logprobs[i]} == set(kept)
        want = within(await distribution(engine, request, answer.token_ids[:i]), kept)
        assert logprob == pytest.approx(want[token], abs=2e-4)


async def test_adapters_come_and_go(engine: Engine, tmp_path: Path) -> None:
    request = ask(12)
    base = await run(engine, request)
    for name, seed in (("a@1", 1), ("a@2", 2)):
        info = await engine.load_adapter(name, write_adapter(tmp_path / name, seed))
        assert (info.name, info.num_layers, info.rank) == (name, 2, 4)
        assert info.norm is None or info.norm > 0
    together = await asyncio.gather(*(run(engine, replace(request, adapter=n)) for n in ("a@1", None, "a@2", "a@1")))
    assert together[1].token_ids == base.token_ids
    assert together[0].token_ids == together[3].token_ids
    assert len({tuple(c.token_ids) for c in together}) == 3
    await engine.load_adapter("a@2", tmp_path / "a@1")
    assert (await run(engine, replace(request, adapter="a@2"))).token_ids == together[0].token_ids
    scored = await engine.score(request.prompt_token_ids + together[0].token_ids, "a@1")
    assert scored[len(request.prompt_token_ids) - 1 :] == pytest.approx(together[0].logprobs, abs=1e-4)
    for name in ("a@1", "a@2", "never-loaded"):
        await engine.unload_adapter(name)
    with pytest.raises(NotFoundError, match="a@1"):
        await run(engine, replace(request, adapter="a@1"))
    with pytest.raises(NotFoundError, match="a@1"):
        await engine.score([1, 2], "a@1")


async def test_policies_do_not_mix_in_a_batch(engine: Engine, tmp_path: Path) -> None:
    """vLLM on CPU gives base requests the weights of an adapter once all its slots for adapters are taken."""
    names = [f"mix@{i}" for i in range(RUNNING)]
    for i, name in enumerate(names):
        await engine.load_adapter(name, write_adapter(tmp_path / name, i + 1))
    policies = [None, *names]
    crowd = await asyncio.gather(*(run(engine, ask(i, adapter=policies[i % 5])) for i in range(RUNNING + WAITING)))
    for i, answer in enumerate(crowd):
        scored = await engine.score([*ask().prompt_token_ids, *answer.token_ids], policies[i % 5])
        assert scored[len(ask().prompt_token_ids) - 1 :] == pytest.approx(answer.logprobs, abs=1e-4), policies[i % 5]
    path = [*ask().prompt_token_ids, *crowd[0].token_ids]
    alone = [await engine.score(path, policy) for policy in policies]
    crowd_of_scores = await asyncio.gather(*(engine.score(path, policy) for policy in policies))
    for one, other in zip(alone, crowd_of_scores, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    for name in names:
        await engine.unload_adapter(name)


async def test_a_prefix_is_reused_by_the_same_policy_only(engine: Engine, tmp_path: Path) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 20
    paths = [write_adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    for name, path in (("p@1", paths[0]), ("p@2", paths[1])):
        await engine.load_adapter(name, path)

    async def answer(adapter: str | None) -> TokenChunk:
        """Checked against `score`, which reads no cache."""
        request = ask(3, adapter=adapter, prompt_token_ids=prompt, max_tokens=4)
        found, again = await run(engine, request), await run(engine, request)
        assert found.token_ids == again.token_ids
        assert again.num_cached_tokens > 0 or isinstance(engine, FakeEngine)
        scored = await engine.score(prompt + found.token_ids, adapter)
        assert scored[len(prompt) - 1 :] == pytest.approx(found.logprobs, abs=1e-4)
        return found

    first = {adapter: await answer(adapter) for adapter in (None, "p@1", "p@2")}
    assert len({tuple(found.logprobs) for found in first.values()}) == 3
    await engine.load_adapter("p@1", paths[1])  # other weights under a name that has a cache
    assert (await answer("p@1")).logprobs == pytest.approx(first["p@2"].logprobs, abs=1e-4)
    for name in ("p@1", "p@2"):
        await engine.unload_adapter(name)


async def test_unloading_lets_running_requests_end(engine: Engine, tmp_path: Path) -> None:
    await engine.load_adapter("a@1", write_adapter(tmp_path, 1))
    request = ask(13, adapter="a@1", max_tokens=200)
    want = await run(engine, request)
    async with aclosing(engine.generate(request, stream=True)) as chunks:
        got = (await anext(chunks)).token_ids
        unloading = asyncio.ensure_future(engine.unload_adapter("a@1"))
        async for chunk in chunks:
            got = got + chunk.token_ids
            if len(got) < 100:
                assert not unloading.done()
    assert got == want.token_ids
    await asyncio.wait_for(unloading, 10)


@pytest.mark.parametrize("damage", ["truncated", "junk", "empty", "missing", "no config"])
async def test_damaged_adapters_are_refused_by_name(engine: Engine, tmp_path: Path, damage: str) -> None:
    folder = write_adapter(tmp_path, 1)
    weights = folder / "adapter_model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-50])
    elif damage == "junk":
        weights.write_bytes(b"\x00" * 1000)
    elif damage == "empty":
        save_file({}, weights)
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="broken@1"):
        await engine.load_adapter("broken@1", folder)
    with pytest.raises(NotFoundError):
        await run(engine, ask(1, adapter="broken@1"))


async def test_leaving_a_completion_frees_its_slot(engine: Engine) -> None:
    for stream in (True, False):
        tasks = [
            asyncio.ensure_future(run(engine, ask(seed, max_tokens=200), stream=stream)) for seed in range(RUNNING)
        ]
        await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        before = (await settled(engine))["generated_tokens"]
        await run(engine, ask(1, max_tokens=3))
        assert (await engine.stats())["generated_tokens"] == before + 3


@pytest.fixture
def sleeper(engine: Engine, request: pytest.FixtureRequest) -> SleepingEngine:
    if request.node.callspec.params["engine"] == "embedded":
        pytest.skip("the embedded engine does not sleep")
    return cast("SleepingEngine", engine)


async def test_a_sleeping_engine_holds_what_it_is_asked(sleeper: SleepingEngine, tmp_path: Path) -> None:
    """Nothing fails, and nothing is computed: what runs goes on where it was, with the tokens that it would have had."""
    engine = sleeper
    await engine.load_adapter("s@1", write_adapter(tmp_path / "1", 1))
    requests = [ask(seed, adapter="s@1", max_tokens=200) for seed in (1, 2)]
    want = [await run(engine, request) for request in requests]
    running = asyncio.ensure_future(run(engine, requests[0], stream=True))
    async with asyncio.timeout(60):
        while (await engine.stats())["running"] == 0:
            await asyncio.sleep(0.01)
    await engine.sleep()
    await engine.sleep()  # nothing more
    before = await engine.stats()
    held = [
        asyncio.ensure_future(run(engine, requests[1])),
        asyncio.ensure_future(engine.score([1, 2, 3], "s@1")),
        asyncio.ensure_future(engine.load_adapter("s@2", write_adapter(tmp_path / "2", 2))),
    ]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in [running, *held])
    assert (await engine.stats())["generated_tokens"] == before["generated_tokens"]
    await engine.wake()
    await engine.wake()
    assert (await running).token_ids == want[0].token_ids
    assert (await held[0]).token_ids == want[1].token_ids
    assert len(await held[1]) == 2
    await held[2]
    again = await run(engine, requests[1])
    assert again.token_ids == want[1].token_ids
    assert again.logprobs == pytest.approx(want[1].logprobs, abs=1e-4)
    for name in ("s@1", "s@2"):
        await engine.unload_adapter(name)


async def test_stats(engine: Engine) -> None:
    stats = await settled(engine)
    assert {"running", "waiting", "adapters", "generated_tokens"} <= stats.keys()
    await run(engine, ask(1, max_tokens=7))
    assert (await engine.stats())["generated_tokens"] == stats["generated_tokens"] + 7
