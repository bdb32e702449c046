from __future__ import annotations

import itertools

import pytest
import torch
from trainer_samples import VOCAB_SIZE, random_samples

from art.trainer import logprobs as module
from art.trainer.logprobs import Head, group_by_row, target_logprobs
from art.trainer.tree import build_tree, check_sample

HIDDEN_SIZE = 16
CPU = torch.device("cpu")


def setup(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, object]:
    paths = [p for s in random_samples(seed, count=10) if (p := check_sample(s, vocab_size=VOCAB_SIZE))]
    tree = build_tree(paths)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(tree), HIDDEN_SIZE, generator=generator)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    return hidden, weight, torch.randn(VOCAB_SIZE, generator=generator), tree.targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: object) -> torch.Tensor:
    logits = hidden[targets.queries] @ weight.T + bias
    logits = logits / torch.from_numpy(targets.temperatures)[:, None]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(targets.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("chunk_elements", [1, 2**19])
def test_values_and_gradients_equal_the_full_softmax(chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, bias, targets = setup()
    rows = group_by_row(targets, CPU)
    assert len(rows.queries) < len(rows.rows)  # some queries do have several targets
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found, _ = target_logprobs(one, Head(weight, bias), rows)
    expected = plain(other, weight, bias, targets)[rows.order]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    coefficients = torch.linspace(-1, 1, len(found))
    (found * coefficients).sum().backward()
    (expected * coefficients).sum().backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_entropy() -> None:
    hidden, weight, bias, targets = setup(1)
    rows = group_by_row(targets, CPU)
    _, entropy = target_logprobs(hidden.requires_grad_(), Head(weight, bias), rows)
    logits = (hidden[rows.queries] @ weight.T + bias) / rows.temperatures[:, None]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy, expected, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad


def test_rows_are_unique_and_ordered() -> None:
    *_, targets = setup(2)
    rows = group_by_row(targets, CPU)
    pairs = list(zip(rows.queries.tolist(), rows.temperatures.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    for row, (start, end) in enumerate(itertools.pairwise(rows.starts)):
        assert set(rows.rows[start:end].tolist()) == {row}
        assert {int(targets.queries[i]) for i in rows.order[start:end]} == {pairs[row][0]}
    assert sorted(rows.order.tolist()) == list(range(len(targets.queries)))
