"""Compiled FlexAttention has few graphs, the gradients of the reference, and never runs uncompiled unnoticed.

FlexAttention refuses a backward pass on the CPU, where only its own fused kernels lack one: without the refusal, and
traced by torch.compile without code being generated, it runs there too. The slow test generates code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from art.errors import TrainingError
from art.trainer import tree_attention as flex
from art.trainer.step.micro_batch import example_layout
from art.trainer.tree import build_tree
from art.trainer.tree_attention import (
    BLOCK_SIZE,
    AttentionFormula,
    KernelName,
    TreeLayout,
    attend_dense,
    attend_flex,
    compiled_function,
    dense_mask,
    flex_rule,
    make_block_mask,
    make_layout,
    padded_length,
)
from tests.support.trainer_samples import paths_of, random_samples

WINDOWS = (None, 100)
LENGTHS = (512, 640, 768, 512)
CPU = torch.device("cpu")


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """Number of graphs that were compiled since the test began."""
    compiled_function.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    compiled_function.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating code, and allow a backward pass on the CPU."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def random_inputs(num_tokens: int, needs_grad: str, num_heads: int = 4) -> list[Tensor]:
    """Query, key and value as models make them. `needs_grad` names those that need a gradient: "qkv", "qv", ""."""
    generator = torch.Generator().manual_seed(num_tokens)
    inputs = []
    for name, heads in zip("qkv", (num_heads, 2, 2), strict=True):
        rows = torch.randn(1, num_tokens, heads * 16, generator=generator).requires_grad_(name in needs_grad)
        heads_first = rows.view(1, num_tokens, heads, 16).transpose(1, 2)
        inputs.append(heads_first if name == "v" else heads_first * 1.5)  # values are views, the others are rotated
    return inputs


def compiled(inputs: list[Tensor], layout: TreeLayout, formula: AttentionFormula) -> Tensor:
    query, key, value = inputs
    return attend_flex(query, key, value, layout, formula, compiles=True)


def same_gradients(inputs: list[Tensor], layout: TreeLayout, formula: AttentionFormula) -> None:
    """Compare output and gradients with the dense reference."""
    query, key, value = inputs
    found, expected = compiled(inputs, layout, formula), attend_dense(query, key, value, layout, formula)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if leaves := [x for x in inputs if x.requires_grad]:
        weights = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
        pairs = (torch.autograd.grad(out, leaves, weights) for out in (found, expected))
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("window", "needs_grad"), [(100, ("qkv", "qv")), (None, ("",))])
def test_a_kind_has_two_graphs(window: int | None, needs_grad: tuple[str, ...], graphs: Callable[[], int]) -> None:
    """Whatever the layouts' lengths, and whichever of the inputs need a gradient."""
    sinks = torch.linspace(-2, 2, 4)
    for num_tokens in LENGTHS:
        layout = example_layout(num_tokens, CPU)
        for names in needs_grad:
            same_gradients(random_inputs(num_tokens, names), layout, AttentionFormula(0.3, window, sinks))
    assert graphs() == 2


@pytest.mark.usefixtures("traced")
def test_too_many_graphs_are_an_error(monkeypatch: pytest.MonkeyPatch, graphs: Callable[[], int]) -> None:
    monkeypatch.setattr(flex, "MAX_GRAPHS", 3)
    layout = example_layout(512, CPU)
    first, *others = (random_inputs(512, "", num_heads) for num_heads in (2, 4, 6, 8))
    for inputs in (first, *others[:2]):
        compiled(inputs, layout, AttentionFormula(0.3, 20))
    with pytest.raises(TrainingError, match=r"compiled FlexAttention 3 times for layers with window 20"):
        compiled(others[2], layout, AttentionFormula(0.3, 20))
    assert graphs() == 3


@pytest.mark.usefixtures("traced", "graphs")
def test_running_uncompiled_is_an_error() -> None:
    layout, inputs = example_layout(512, CPU), random_inputs(512, "")
    with torch.compiler.set_stance("force_eager"), pytest.raises(TrainingError, match="without being compiled"):
        compiled(inputs, layout, AttentionFormula(0.3))
    with torch._dynamo.config.patch(disable=True), pytest.raises(TrainingError, match="without being compiled"):
        compiled(inputs, layout, AttentionFormula(0.3))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generated_code_of_a_sliding_window_model_has_the_same_outputs(graphs: Callable[[], int]) -> None:
    for num_tokens in LENGTHS:
        layout = example_layout(num_tokens, CPU)
        for window in WINDOWS:
            same_gradients(random_inputs(num_tokens, ""), layout, AttentionFormula(0.3, window))
    assert graphs() == 2 * len(WINDOWS)


# -- block masks --


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


@settings(max_examples=30, deadline=None)
@given(depths, st.sampled_from([None, 1, 2, 3, 7, 20, 1000]), st.sampled_from([2, 4, 8, 16]))
def test_it_has_the_blocks_of_the_mask_of_all_pairs(
    steps: list[tuple[bool, int]], window: int | None, block_size: int
) -> None:
    positions, ends = lay_out(steps)
    size = len(positions)
    ours = make_block_mask(positions, ends, window, block_size=block_size)
    rule = flex_rule(positions, ends, window)
    theirs = create_block_mask(rule, None, None, size, size, device="cpu", BLOCK_SIZE=block_size)
    (partial, full), (expected, expected_full) = lists(ours), lists(theirs)
    assert full == expected_full
    assert partial == expected or window is not None  # a window may leave empty blocks among the partial ones
    assert all(set(few) <= set(row) for few, row in zip(expected, partial, strict=True))
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE


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


# -- padding --


@pytest.mark.parametrize(("kernel", "length"), [("dense", None), ("blocks", None), ("flex", 512)])
def test_only_flex_layouts_are_padded(kernel: KernelName, length: int | None) -> None:
    paths = paths_of(random_samples(5, count=20))
    tree = build_tree(paths)
    layout = make_layout(tree, device=CPU, kernel=kernel)
    size = len(tree)
    assert len(layout.token_ids) == len(layout.positions) == len(layout.subtree_end) == (length or size)
    assert (layout.num_tokens, layout.num_padding) == (size, (length or size) - size)
    for name in ("token_ids", "positions", "subtree_end"):
        assert np.array_equal(getattr(layout, name)[:size].numpy(), getattr(tree, name))
    for window in (None, 3):
        mask = dense_mask(layout.positions, layout.subtree_end, window)
        own = dense_mask(torch.from_numpy(tree.positions), torch.from_numpy(tree.subtree_end), window)
        assert torch.equal(mask[:size, :size], own)
        assert not mask[:size, size:].any()
        assert not mask[size:, :size].any()
        assert torch.equal(mask[size:, size:], torch.eye(layout.num_padding, dtype=torch.bool))
