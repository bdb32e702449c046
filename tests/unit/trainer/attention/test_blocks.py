"""Attention in blocks of queries equals the textbook's attention under the dense mask, in values and gradients."""

from __future__ import annotations

import pytest
import torch

from art.trainer import block_attention
from art.trainer.block_attention import split_queries
from art.trainer.step.micro_batch import example_layout
from art.trainer.tree import PrefixTree, build_tree
from art.trainer.tree_attention import (
    AttentionFormula,
    TreeLayout,
    attend_blocks,
    attend_dense,
    dense_mask,
)
from tests.support.trainer_samples import paths_of, random_samples


def random_tree(seed: int, count: int = 24) -> PrefixTree:
    return build_tree(paths_of(random_samples(seed, count=count)))


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The textbook's: all scores at once, and a sink as one more column of the softmax."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    scores = (0.3 * query @ key.transpose(2, 3)).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[1:3], 1)[None]], dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


@pytest.mark.parametrize("keep_bytes", [2**26, 0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("block", [128, 3, 1])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
def test_values_and_gradients_equal_plain_attention(
    keep_bytes: int,
    with_sinks: bool,
    window: int | None,
    block: int,
    heads: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_attention, "QUERIES_AT_ONCE", block)
    monkeypatch.setattr(block_attention, "_KEEP_BYTES", keep_bytes)
    tree = random_tree(7)
    num_tokens, (num_heads, groups) = len(tree), heads
    generator = torch.Generator().manual_seed(0)
    # Keys and values of different sizes, as multi-head latent attention has them.
    query, key, value = (
        torch.randn(1, n, num_tokens, d, generator=generator, requires_grad=True)
        for n, d in ((num_heads, 8), (groups, 8), (groups, 6))
    )
    sinks = torch.randn(num_heads, generator=generator, requires_grad=True) if with_sinks else None
    positions, ends = torch.from_numpy(tree.positions), torch.from_numpy(tree.subtree_end)
    layout, formula = TreeLayout(positions, positions, ends, kernel="blocks"), AttentionFormula(0.3, window, sinks)
    inputs = [query, key, value, *([] if sinks is None else [sinks])]
    expected = plain_attention(query, key, value, dense_mask(positions, ends, window), sinks)
    weights = torch.randn(expected.shape, generator=generator)
    gradients = torch.autograd.grad(expected, inputs, weights)
    for ours in (
        attend_blocks(query, key, value, layout, formula),
        attend_dense(query, key, value, layout, formula),
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        for one, other in zip(torch.autograd.grad(ours, inputs, weights), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("keep_bytes", [2**26, 0])
def test_a_long_shared_prompt_without_losses_of_its_own(keep_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "QUERIES_AT_ONCE", 16)
    monkeypatch.setattr(block_attention, "_KEEP_BYTES", keep_bytes)
    layout = example_layout(200, torch.device("cpu"))
    called = []
    kernel = block_attention.scaled_dot_product_attention
    monkeypatch.setattr(
        block_attention, "scaled_dot_product_attention", lambda *x, **y: called.append(x) or kernel(*x, **y)
    )
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, n, 200, 8, generator=generator, requires_grad=True) for n in (4, 2, 2)]
    expected = attend_dense(*inputs, layout, AttentionFormula(0.3))
    weights = torch.randn(expected.shape, generator=generator)
    weights[:, :100] = 0  # the prompt, which half of the layout is
    ours = attend_blocks(*inputs, layout, AttentionFormula(0.3))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert [x[0].shape[2] for x in called] == ([] if keep_bytes else [112]), "the prompt, and the block of its end"
    pairs = (torch.autograd.grad(one, inputs, weights) for one in (ours, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_a_block_has_only_keys_that_one_of_its_queries_attends(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "QUERIES_AT_ONCE", 5)
    tree = random_tree(3)
    positions, ends = torch.from_numpy(tree.positions), torch.from_numpy(tree.subtree_end)
    blocks = split_queries(positions, ends, window)
    assert [block.start for block in blocks] == [0, *(block.end for block in blocks[:-1])]
    assert blocks[-1].end == len(tree)
    whole = dense_mask(positions, ends, window)
    for block in blocks:
        own = whole[block.start : block.end]
        keys = torch.cat([torch.arange(start, end) for start, end in block.runs])
        attends = torch.nn.functional.pad(block.hidden == 0, (len(keys) - block.hidden.shape[1], 0), value=True)
        assert torch.equal(attends, own[:, keys])
        assert own.sum() == attends.sum()  # no key is missing
        assert window is not None or bool(attends.any(0).all())
