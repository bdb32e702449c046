"""The layout of a tree is padded for flex. Padding changes nothing that is computed for the tree's tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from art.trainer.attention.tree_attention import KernelName, dense_mask, make_layout
from art.trainer.tree.tree import build_tree, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, random_samples

CPU = torch.device("cpu")


@pytest.mark.parametrize(("kernel", "length"), [("dense", None), ("chains", None), ("flex", 512)])
def test_only_flex_layouts_are_padded(kernel: KernelName, length: int | None) -> None:
    paths = [p for sample in random_samples(5, count=20) if (p := check_sample(sample, vocab_size=VOCAB_SIZE))]
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
