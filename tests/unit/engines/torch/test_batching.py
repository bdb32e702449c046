"""Requests in one batch do not know of each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from art.engines.torch.embedded import TorchEngine
from art.errors import ConflictError, ContextLengthError, InvalidRequestError, NotFoundError
from tests.support.engine import drain, failed, generate, load, request, score, tokens, write_adapter

NAMES = (None, "a@1", "b@1")


@pytest.mark.parametrize("general", [False, True])
def test_a_mixed_batch_equals_separate_runs(
    qwen3: Path, adapters: tuple[Path, Path], general: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if general:
        monkeypatch.setattr("art.engines.torch.base_model.LLAMA_CLASSES", frozenset())
    engine = load(qwen3)
    for name, path in zip(NAMES[1:], adapters, strict=True):
        engine.load_adapter(name, path)
    requests = [request(tokens(i % 4, 6 + i), 16, seed=i, adapter=NAMES[i % 3]) for i in range(12)]
    together = generate(engine, *requests)
    assert max(r.num_cached_tokens for r in together) == 0
    for one, result in zip(requests, together, strict=True):
        (alone,) = generate(load_with(qwen3, adapters), one)
        assert result.token_ids == alone.token_ids
        assert result.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        sequence = one.prompt_token_ids + result.token_ids
        assert score(engine, sequence, one.adapter)[len(one.prompt_token_ids) - 1 :] == pytest.approx(
            result.logprobs, abs=1e-4
        )


def load_with(model: Path, adapters: tuple[Path, Path]) -> TorchEngine:
    engine = load(model)
    for name, path in zip(NAMES[1:], adapters, strict=True):
        engine.load_adapter(name, path)
    return engine


def test_requests_join_and_leave_at_any_step(engine: TorchEngine, qwen3: Path) -> None:
    requests = [request(tokens(i, 3 + i % 5), 5 + 3 * (i % 4), seed=i) for i in range(20)]
    chunks = {}
    for i, one in enumerate(requests):
        engine.submit(one, stream=False)
        for _ in range(i % 3):
            chunks |= {o.request_id: o.chunk for o in engine.step()}
    chunks |= {o.request_id: o.chunk for o in drain(engine)}
    reference = load(qwen3)
    for one in requests:
        assert chunks[one.request_id].token_ids == generate(reference, one)[0].token_ids


def test_prefill_does_not_stall_decoding(qwen3: Path) -> None:
    engine = load(qwen3, prefill_tokens=32)
    short = request(tokens(1, 4), 30)
    engine.submit(short, stream=True)
    engine.step()
    engine.submit(request(tokens(2, 320), 2), stream=False)
    for _ in range(16):
        outputs = engine.step()
        assert [o.request_id for o in outputs if o.request_id == short.request_id] == [short.request_id]
    assert engine.stats()["prefill_tokens"] == 4 + 320


def test_a_prompt_and_its_answer_fill_the_context_exactly(qwen3: Path) -> None:
    engine = load(qwen3, max_context=32)
    (result,) = generate(engine, request(tokens(1, 30), 10))
    assert (len(result.token_ids), result.finish_reason) == (2, "length")
    (result,) = generate(engine, request(tokens(1, 31), 10))
    assert (len(result.token_ids), result.finish_reason) == (1, "length")
    with pytest.raises(ContextLengthError, match=r"32 tokens.*context of 32"):
        engine.submit(request(tokens(1, 32), 10), stream=False)
    assert len(score(engine, tokens(1, 32))) == 31
    with pytest.raises(ContextLengthError):
        engine.submit_score("s", tokens(1, 33), None)


def test_a_slot_that_outgrows_its_row_moves(qwen3: Path) -> None:
    engine = load(qwen3)
    long, short = request(tokens(1, 250), 200, seed=1), request(tokens(2, 10), 200, seed=2)
    together = generate(engine, long, short)
    assert [len(pool.slots) > 0 for pool in engine._scheduler.cache.pools] == [True, True]
    for one, result in zip((long, short), together, strict=True):
        sequence = one.prompt_token_ids + result.token_ids
        assert score(engine, sequence)[len(one.prompt_token_ids) - 1 :] == pytest.approx(result.logprobs, abs=1e-4)


def test_ids_and_adapters_are_checked(qwen3: Path) -> None:
    engine = load(qwen3, max_running=2)
    engine.submit(request([1], 5, request_id="x"), stream=False)
    with pytest.raises(ConflictError, match="'x'"):
        engine.submit(request([1], 5, request_id="x"), stream=False)
    with pytest.raises(NotFoundError, match=r"'no@1'.*loaded: none"):
        engine.submit(request([1], 5, adapter="no@1"), stream=False)
    for _ in range(2):
        engine.submit(request([1], 5), stream=False)
    assert len(drain(engine)) == 3


@pytest.fixture
def broken(qwen3: Path, tmp_path: Path) -> Path:
    """An adapter of finite weights whose products overflow."""
    adapter = write_adapter(tmp_path, qwen3)
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({k: v * 1e30 for k, v in weights.items()}, adapter / "adapter_model.safetensors")
    return adapter


def test_broken_weights_fail_their_own_requests_only(engine: TorchEngine, broken: Path) -> None:
    engine.load_adapter("broken@1", broken)
    good, bad = request(tokens(1, 20), 10), request(tokens(1, 20), 10, adapter="broken@1")
    (want,) = generate(engine, good)
    for one in (good, bad):
        engine.submit(one, stream=False)
    engine.submit_score("score", tokens(1, 20), "broken@1")
    outputs = drain(engine)
    assert set(failed(outputs)) == {bad.request_id, "score"}
    for error in failed(outputs).values():
        assert "broken@1" in error.message
        assert "NaN" in error.message
    assert next(o.chunk for o in outputs if o.chunk is not None).token_ids == want.token_ids


@pytest.mark.parametrize("ending", ["failure", "cancel"])
def test_rows_that_held_nan_are_used_again_without_harm(qwen3: Path, broken: Path, ending: str) -> None:
    engine = load(qwen3, max_context=256, kv_cache_tokens=512, prefill_tokens=64)  # two rows
    engine.load_adapter("broken@1", broken)
    # The short one's row is read, under a mask, as far as the long one reaches: where the broken ones left their keys.
    good = [request(tokens(2, 90), 10), request(tokens(1, 10), 10)]
    want = generate(load(qwen3), *good)
    bad = [request(tokens(i, 120), 10, adapter="broken@1") for i in range(2)]
    for one in bad:
        engine.submit(one, stream=False)
    if ending == "cancel":
        engine.step()
        for one in bad:
            engine.cancel(one.request_id)
    else:
        assert len(failed(drain(engine))) == 2
    assert [r.token_ids for r in generate(engine, *good)] == [w.token_ids for w in want]


def test_abort_leaves_a_working_engine(engine: TorchEngine) -> None:
    requests = [request(tokens(i, 10), 10) for i in range(3)]
    want = generate(engine, *requests)
    for one in requests:
        engine.submit(one, stream=False)
    engine.step()
    assert set(failed(engine.abort_all(InvalidRequestError("boom")))) == {r.request_id for r in requests}
    assert not engine.has_work
    assert engine.stats()["slots_idle"] == 3  # those of the first round: nothing of the aborted ones is trusted
    assert [r.token_ids for r in generate(engine, *requests)] == [w.token_ids for w in want]
