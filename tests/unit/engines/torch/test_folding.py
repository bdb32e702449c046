"""An adapter that samples alone is folded into the weights, and computes what it computed before."""

from __future__ import annotations

from pathlib import Path

import pytest

from art.engines.torch import linear
from art.engines.torch.embedded import TorchEngine
from art.engines.torch.linear import Linear
from tests.support.engine import generate, load, request, tokens


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the linear layers in the order in which they were folded."""
    calls: list[int] = []
    plain = Linear.fold
    monkeypatch.setattr(Linear, "fold", lambda self, factors: calls.append(self.index) or plain(self, factors))
    return calls


def with_adapters(model: Path, adapters: tuple[Path, Path]) -> TorchEngine:
    engine = load(model)
    for name, path in zip(("a@1", "b@1"), adapters, strict=True):
        engine.load_adapter(name, path)
    return engine


def test_a_sole_adapter_is_folded_once_and_means_the_same(
    qwen3: Path, adapters: tuple[Path, Path], folded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_adapters(qwen3, adapters)
    requests = [request(tokens(i, 5), 12, seed=i, adapter="a@1") for i in range(3)]
    got = generate(engine, *requests)
    assert sorted(folded) == list(range(engine._model.decoder.num_linears))
    monkeypatch.setattr(linear, "_MAX_FOLDED_BYTES", 0)
    plain = generate(with_adapters(qwen3, adapters), *requests)
    assert len(folded) == engine._model.decoder.num_linears
    for one, other in zip(got, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_each_request_gets_its_own_weights_whatever_is_folded(
    qwen3: Path, adapters: tuple[Path, Path], folded: list[int]
) -> None:
    engine = with_adapters(qwen3, adapters)
    alone = {
        name: generate(with_adapters(qwen3, adapters), request(tokens(0, 5), 8, adapter=name))[0]
        for name in (None, "a@1", "b@1")
    }
    folded.clear()
    order = ("a@1", "b@1", None, "a@1")
    for name in order:  # b is folded in place of a, and the base model in between uses neither
        (got,) = generate(engine, request(tokens(0, 5), 8, adapter=name))
        assert got.token_ids == alone[name].token_ids
        assert got.logprobs == pytest.approx(alone[name].logprobs, abs=1e-4)
    assert len(folded) == 3 * engine._model.decoder.num_linears
    together = generate(engine, *(request(tokens(0, 5), 8, adapter=name) for name in order))
    assert [chunk.token_ids for chunk in together] == [alone[name].token_ids for name in order]


def test_a_name_that_is_loaded_again_is_folded_again(
    qwen3: Path, adapters: tuple[Path, Path], folded: list[int]
) -> None:
    engine = with_adapters(qwen3, adapters)
    generate(engine, request(tokens(0, 5), 8, adapter="a@1"))
    engine.load_adapter("a@1", adapters[1])
    (got,) = generate(engine, request(tokens(0, 5), 8, adapter="a@1"))
    (want,) = generate(engine, request(tokens(0, 5), 8, adapter="b@1"))
    assert got.token_ids == want.token_ids
