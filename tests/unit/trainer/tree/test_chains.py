"""Attention by chains: each chain is done once, alone or in a bundle, and equals attention under the dense mask."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from art.trainer.attention import chain_attention
from art.trainer.attention.chain_attention import ChainKeys, ChainWork, attend_chains, make_chain_keys, plan_chains
from art.trainer.attention.tree_attention import Formula, TreeLayout, attend_dense, dense_mask
from art.trainer.tree.tree import PrefixTree, build_tree, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, random_samples


def random_tree(seed: int, count: int = 24) -> PrefixTree:
    return build_tree([p for s in random_samples(seed, count=count) if (p := check_sample(s, vocab_size=VOCAB_SIZE))])


def chain_keys(tree: PrefixTree) -> list[ChainKeys]:
    return [make_chain_keys(chain) for chain in tree.chains]


def members(work: Sequence[ChainWork]) -> list[ChainKeys]:
    return [chain for item in work for chain in item.chains]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [4, 96])
def test_every_chain_is_planned_once(seed: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_attention, "BLOCK", block)
    tree = random_tree(seed)
    keys = chain_keys(tree)
    work = plan_chains(keys, num_tokens=len(tree), num_heads=4, window=None)
    assert sorted(members(work), key=lambda c: c.start) == sorted(keys, key=lambda c: c.start)
    bundles = [item for item in work if item.keys is not None]
    assert bundles or block == 4
    for bundle in bundles:
        padded = bundle.blocks[0].hidden.numel()
        assert max(chain.num_queries for chain in bundle.chains) <= block
        assert padded <= chain_attention._MAX_PADDED * sum(c.num_queries * c.num_keys for c in bundle.chains)
        assert padded * 4 <= chain_attention._BUNDLE_SCORES


def test_chains_that_differ_much_are_not_bundled() -> None:
    one, other = ChainKeys(0, 2, ((0, 2),)), ChainKeys(2, 12, ((0, 12),))
    assert not any(w.keys is not None for w in plan_chains([one, other], num_tokens=12, num_heads=1, window=None))


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


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("block", "max_padded"), [(96, 1.25), (96, 100.0), (3, 1.25)])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
def test_values_and_gradients_equal_plain_attention(
    with_sinks: bool,
    window: int | None,
    block: int,
    max_padded: float,
    heads: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain_attention, "BLOCK", block)
    monkeypatch.setattr(chain_attention, "_MAX_PADDED", max_padded)
    tree = random_tree(7)
    num_tokens, (num_heads, groups) = len(tree), heads
    generator = torch.Generator().manual_seed(0)
    # Keys and values of different sizes, as multi-head latent attention has them.
    query, key, value = (
        torch.randn(1, n, num_tokens, d, generator=generator, requires_grad=True)
        for n, d in ((num_heads, 8), (groups, 8), (groups, 6))
    )
    sinks = torch.randn(num_heads, generator=generator, requires_grad=True) if with_sinks else None
    work = plan_chains(chain_keys(tree), num_tokens=num_tokens, num_heads=num_heads, window=window)
    positions, ends = torch.from_numpy(tree.positions), torch.from_numpy(tree.subtree_end)
    layout = TreeLayout(positions, positions, ends, chains=[], kernel="dense")
    inputs = [query, key, value, *([] if sinks is None else [sinks])]
    expected = plain_attention(query, key, value, dense_mask(positions, ends, window), sinks)
    weights = torch.randn(expected.shape, generator=generator)
    gradients = torch.autograd.grad(expected, inputs, weights)
    for ours in (
        attend_chains(query, key, value, work, 0.3, sinks),
        attend_dense(query, key, value, layout, Formula(0.3, window, sinks)),
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        for one, other in zip(torch.autograd.grad(ours, inputs, weights), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
