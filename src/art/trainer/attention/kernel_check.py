"""Test an attention kernel on the first batch that uses it, before anything is trained with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from art.errors import TrainingError
from art.protocol.samples import plain_sample
from art.trainer.attention.kernel_choice import HeadShape
from art.trainer.attention.tree_attention import KERNELS, Formula, KernelName, TreeLayout, attend_dense, make_layout
from art.trainer.policy.base_model import BaseModel
from art.trainer.tree.tree import SamplePath, build_tree, check_sample

_MAX_TOKENS = 1024
"""Most tokens to compare on. The reference needs memory for all pairs of tokens."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest allowed error, as a share of the largest number. Rounding stays well below; a wrong key gives about 1."""


def check_kernel(base: BaseModel, kernel: KernelName, paths: Sequence[SamplePath]) -> None:
    """Compare an attention kernel with the dense reference: outputs and gradients, on the first samples of `paths`.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    if kernel in ("dense", "own"):
        return
    layout = make_layout(build_tree(_first(paths, base)), device=base.device, kernel=kernel)
    heads = HeadShape.of(base)
    inputs = heads.random_inputs(len(layout.token_ids))
    expected = _run(attend_dense, inputs, layout, heads.size)
    computed = _run(KERNELS[kernel], inputs, layout, heads.size)
    for name, one, other in zip(("output", "query", "key", "value", "sinks"), expected, computed, strict=False):
        error = float((one - other).abs().max() / one.abs().max())
        if not error <= _TOLERANCE.get(heads.dtype, 5e-2):
            raise TrainingError(
                f"the {kernel!r} attention kernel is wrong on this machine: its {name} differs from the reference by "
                f"{error:.2g} of the largest value. Nothing was trained; please report torch's version and the device"
            )


def _first(paths: Sequence[SamplePath], base: BaseModel) -> list[SamplePath]:
    """The first of `paths` that fit the reference together, or the beginning of the first one."""
    ends = accumulate(path.num_tokens for path in paths)
    if chosen := [path for path, end in zip(paths, ends, strict=True) if end <= _MAX_TOKENS]:
        return chosen
    tokens = list(paths[0].sample.token_ids[:_MAX_TOKENS])
    beginning = check_sample(plain_sample(tokens, "kernel-check"), vocab_size=base.vocab_size)
    assert beginning is not None
    return [beginning]


def _run(function: Any, inputs: list[Tensor], layout: TreeLayout, size: int) -> list[Tensor]:
    """Output of an attention function and the gradients of all inputs, in float32."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    query, key, value, *sinks = leaves
    out = function(query, key, value, layout, Formula(size**-0.5, sinks=sinks[0] if sinks else None))
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    gradients = torch.autograd.grad(out, leaves, weights)
    return [x.detach().float() for x in (out, *gradients)]
