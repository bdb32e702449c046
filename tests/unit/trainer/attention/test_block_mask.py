"""The block mask made from extremes of blocks is the one that FlexAttention itself makes from all pairs of tokens."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from art.trainer.attention import flex
from art.trainer.attention.flex import BLOCK_SIZE, classify_blocks, flex_rule, make_block_mask
from art.trainer.attention.tree_attention import dense_mask, padded_length

# A tree in depth-first order: each token hangs below the one before it, or below one of that token's ancestors.
depths = st.lists(st.tuples(st.booleans(), st.integers(0, 40)), min_size=1, max_size=90)


def lay_out(steps: list[tuple[bool, int]]) -> tuple[Tensor, Tensor]:
    """Positions and subtree ends. A step goes on below the last token, or starts a branch at some depth."""
    positions: list[int] = []
    ends = [len(steps)] * len(steps)
    path: list[int] = []
    for index, (goes_on, depth) in enumerate(steps):
        cut = len(path) if goes_on else min(depth, len(path))
        for closed in path[cut:]:
            ends[closed] = index
        path = [*path[:cut], index]
        positions.append(cut)
    return torch.tensor(positions), torch.tensor(ends)


def long_tree(num_tokens: int) -> tuple[Tensor, Tensor]:
    """A prompt, then turns of a few hundred tokens that each continue a random earlier turn."""
    generator = torch.Generator().manual_seed(num_tokens)
    steps = []
    while len(steps) < num_tokens:
        cut = int(torch.randint(0, len(steps) // 2 + 1, (1,), generator=generator))
        steps += [(False, cut), *[(True, 0)] * int(torch.randint(1, 700, (1,), generator=generator))]
    return lay_out(steps[:num_tokens])


def lists(mask: BlockMask) -> list[list[list[int]]]:
    """The partial and the full blocks of each block of queries."""
    found = []
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        rows = zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
        found.append([sorted(row[:count]) for count, row in rows])
    return found


@settings(max_examples=60, deadline=None)
@given(depths, st.sampled_from([None, 1, 2, 3, 7, 20, 1000]), st.sampled_from([2, 4, 8, 16]))
def test_it_equals_the_mask_of_all_pairs(steps: list[tuple[bool, int]], window: int | None, block_size: int) -> None:
    positions, ends = lay_out(steps)
    size = len(positions)
    ours = make_block_mask(positions, ends, window, block_size=block_size)
    rule = flex_rule(positions, ends, window)
    theirs = create_block_mask(rule, None, None, size, size, device="cpu", BLOCK_SIZE=block_size)
    assert lists(ours) == lists(theirs)
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert (ours.q_num_blocks == theirs.q_num_blocks).all()
    assert ours.full_q_num_blocks is not None
    assert (ours.full_q_num_blocks == theirs.full_q_num_blocks).all()


@settings(max_examples=150, deadline=None)
@given(depths, st.sampled_from([None, 1, 5, 20]), st.sampled_from([2, 5, 8]))
def test_full_blocks_are_full_and_empty_ones_empty(
    steps: list[tuple[bool, int]], window: int | None, block_size: int
) -> None:
    positions, ends = lay_out(steps)
    some, every = classify_blocks(positions, ends, window, block_size=block_size)
    assert not (every & ~some).any()
    pairs = dense_mask(positions, ends, window)
    for row, column in itertools.product(range(len(some)), repeat=2):
        queries, keys = (slice(i * block_size, (i + 1) * block_size) for i in (row, column))
        block = pairs[queries, keys]
        assert bool(some[row, column]) == bool(block.any())
        assert not every[row, column] or (block.all() and block.shape == (block_size, block_size))


@pytest.mark.parametrize("window", [None, 128, 500, 3000])
@pytest.mark.parametrize("num_tokens", [512, 2048, 2500])
def test_large_blocks_of_long_trees(num_tokens: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that FlexAttention uses, and several parts of the blocks of queries."""
    monkeypatch.setattr(flex, "_PAIRS_AT_ONCE", 2**12)
    positions, ends = long_tree(num_tokens)
    rule = flex_rule(positions, ends, window)
    theirs = create_block_mask(rule, None, None, num_tokens, num_tokens, device="cpu", BLOCK_SIZE=BLOCK_SIZE)
    partial, full = lists(make_block_mask(positions, ends, window))
    assert [partial, full] == lists(theirs)
    assert any(full) == (window != 128)  # within a window of one block, no block of queries sees all of another one


@pytest.mark.parametrize("window", [None, 4096])
def test_no_pairs_of_tokens_are_stored(window: int | None, tmp_path: Path) -> None:
    """At 32,768 tokens the pairs alone take 1 GB."""
    positions, ends = long_tree(32_768)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        make_block_mask(positions, ends, window)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    in_use = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
    assert len(in_use) > 20
    assert max(in_use) - in_use[0] < 60e6


def test_padded_lengths_are_few_and_waste_little() -> None:
    lengths = {size: padded_length(size) for size in range(1, 65_537)}
    for size, length in lengths.items():
        assert length >= size
        assert length % BLOCK_SIZE == 0
        assert length == 512 or length - size < max(BLOCK_SIZE, math.ceil(size / 32))
    assert len(set(lengths.values())) == 157
    assert [padded_length(size) for size in (16_384, 65_536)] == [16_384, 65_536]  # budgets that are powers of 2
