"""An adapter that samples alone is folded into the weights, and computes what it computed before."""

from __future__ import annotations

from pathlib import Path

import pytest

from art.engines.torch import folding
from art.engines.torch.embedded import TorchEngine
from art.engines.torch.linear import Linear
from tests.support.engine import generate, hf_logprobs, hf_model, load, make_model, request, tokens, write_adapter


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
    monkeypatch.setattr(folding, "_MAX_BYTES", 0)
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


def test_turns_between_adapters_fold_nothing(qwen3: Path, adapters: tuple[Path, Path], folded: list[int]) -> None:
    engine = with_adapters(qwen3, adapters)
    for i in range(8):
        generate(engine, request(tokens(i, 5), 2, adapter=("a@1", "b@1")[i % 2]))
    assert not folded


def test_a_name_that_is_loaded_again_is_folded_again(
    qwen3: Path, adapters: tuple[Path, Path], folded: list[int]
) -> None:
    engine = with_adapters(qwen3, adapters)
    generate(engine, request(tokens(0, 5), 8, adapter="a@1"))
    engine.load_adapter("a@1", adapters[1])
    (got,) = generate(engine, request(tokens(0, 5), 8, adapter="a@1"))
    (want,) = generate(engine, request(tokens(0, 5), 8, adapter="b@1"))
    assert got.token_ids == want.token_ids


def test_half_precision_is_not_folded(qwen3: Path, adapters: tuple[Path, Path], folded: list[int]) -> None:
    engine = load(qwen3, dtype="bfloat16")
    engine.load_adapter("a@1", adapters[0])
    generate(engine, request(tokens(0, 5), 8, adapter="a@1"))
    assert not folded


def test_packed_layers_fold_into_packed_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model", "qwen3", hidden_size=256, intermediate_size=512)
    path = write_adapter(tmp_path / "a", model, std=0.05)
    monkeypatch.setattr("art.kernels.packed_linear.MIN_GAIN", 0.0)
    engine = load(model)
    if not any(linear.is_packed for linear in engine._model.decoder._linears):
        pytest.skip("no oneDNN packed weights on this processor")
    engine.load_adapter("a@1", path)
    prompt = tokens(0, 5)
    (got,) = generate(engine, request(prompt, 8, adapter="a@1"))
    import peft

    merged = peft.PeftModel.from_pretrained(hf_model(model), path).merge_and_unload()
    want = hf_logprobs(merged, prompt + got.token_ids)[len(prompt) - 1 :]
    assert got.logprobs == pytest.approx(want, abs=1e-4)
