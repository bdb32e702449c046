"""Requests with grammars in the embedded engine: preemption, cancelling, and wrong grammars."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from art.engine import GenerateRequest
from art.engines.torch.embedded import TorchEngine, forbid
from art.engines.torch.kv_cache import KVCache
from art.errors import ArtError, InvalidRequestError
from art.kernels.grammar import Vocabulary
from tests.support.engine import load, make_model
from tests.support.grammars import GRAMMAR, STOPS, check_answer, make_tokenizer, mask_of, save_tokenizer

VOCAB = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen3")
    save_tokenizer(folder)
    return folder


@pytest.fixture
def engine(model: Path) -> TorchEngine:
    return load(model)


def ask(number: int = 0, **fields: Any) -> GenerateRequest:
    defaults = {
        "request_id": str(number), "adapter": None, "prompt_token_ids": [5, 9, 33, 40 + number], "max_tokens": 60,
        "stop_token_ids": STOPS, "seed": number, "grammar": GRAMMAR,
    }  # fmt: skip
    return GenerateRequest(**{**defaults, **fields})


def run(engine: TorchEngine) -> dict[str, list[int] | Exception]:
    """Tokens or error of each request."""
    results: dict[str, Any] = {}
    while engine.has_work:
        for output in engine.step():
            results[output.request_id] = output.error or output.chunk.token_ids
    return results


def text(token_ids: list[int]) -> str:
    return make_tokenizer().decode(token_ids[:-1], skip_special_tokens=False)


def test_a_preempted_request_keeps_its_place_in_the_grammar(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm, busy = load(model), load(model)
    for engine in (calm, busy):
        for number in range(3):
            engine.submit(ask(number), stream=False)
    expected = run(calm)
    grow, asked = KVCache.grow, itertools.count()
    monkeypatch.setattr(KVCache, "grow", lambda *args: next(asked) % 7 != 6 and grow(*args))
    found = run(busy)
    assert busy.stats()["preemptions"] > 2
    assert found == expected
    for tokens in found.values():
        check_answer(text(tokens))


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = load(make_model(tmp_path / "bare", "qwen3"))
    assert not engine.info().grammars
    assert "tokenizer.json" in caplog.text
    with pytest.raises(InvalidRequestError, match="grammar"):
        engine.submit(ask(), stream=False)


def test_a_grammar_that_no_token_can_continue_ends_only_its_own_request(engine: TorchEngine) -> None:
    engine.submit(ask(1, grammar='start: "ab" "\u00e9"'), stream=False)  # the vocabulary has no such letter
    engine.submit(ask(2), stream=False)
    results = run(engine)
    assert isinstance(results["1"], InvalidRequestError)
    assert "cannot be continued at token" in str(results["1"])
    check_answer(text(results["2"]))


def test_a_defect_of_the_compiler_ends_only_its_own_request(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicError(BaseException):
        """Rust's panics are no `Exception` in Python."""

    def matcher(*_: Any) -> Any:
        raise PanicError("index out of bounds")

    engine.submit(ask(2, grammar=None, stop_token_ids=(), max_tokens=3), stream=False)
    monkeypatch.setattr(Vocabulary, "matcher", matcher)
    with pytest.raises(ArtError, match="index out of bounds"):
        engine.submit(ask(1), stream=False)
    assert len(run(engine)["2"]) == 3


@pytest.mark.parametrize("vocab_size", [3, 32, 33, 5000])
def test_forbidden_logits_become_minus_infinity(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    logits = torch.randn(3, vocab_size)
    allowed = [sorted({0, vocab_size - 1, *rng.integers(0, vocab_size, 7).tolist()}) for _ in range(2)]
    before = logits.clone()
    forbid(logits, [0, 2], np.stack([mask_of(ids, vocab_size) for ids in allowed]))
    for row, ids in ((0, allowed[0]), (1, list(range(vocab_size))), (2, allowed[1])):
        finite = logits[row].isfinite().nonzero()[:, 0].tolist()
        assert finite == ids
        assert (logits[row][ids] == before[row][ids]).all()
