"""A kernel proves itself on the first batch that it meets, before anything is learnt from what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from art.errors import TrainingError
from art.trainer.attention import KERNELS, TreeLayout, attend_dense, default_kernel, make_layout
from art.trainer.model import BaseModel
from art.trainer.tree import SamplePath, build_tree

_MAX_TOKENS = 1024
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest error relative to the largest number; rounding stays well below, a wrong key is of order one."""


def check_kernel(base: BaseModel, paths: Sequence[SamplePath]) -> None:
    """Compare the kernel of this device with the dense reference: outputs and gradients, on the first of `paths`.

    Raises:
        TrainingError: they differ.
    """
    kernel = default_kernel(base.device)
    if kernel == "dense":
        return
    chosen: list[SamplePath] = []
    for path in paths:
        if chosen and sum(len(p.token_ids) for p in chosen) + len(path.token_ids) > _MAX_TOKENS:
            break
        chosen.append(path)
    layout = make_layout(build_tree(chosen), device=base.device, kernel=kernel)
    model: Any = base.model
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    dtype = base.head.weight.dtype
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, len(layout.token_ids), size) for count in (heads, groups, groups)]
    inputs = [torch.randn(shape, generator=generator).to(base.device, dtype) for shape in shapes]
    expected = _run(attend_dense, inputs, layout, size)
    found = _run(KERNELS[kernel], inputs, layout, size)
    for name, one, other in zip(("output", "query", "key", "value"), expected, found, strict=True):
        error = float((one - other).abs().max() / one.abs().max())
        if not error <= _TOLERANCE.get(dtype, 5e-2):
            raise TrainingError(
                f"the {kernel!r} attention kernel is wrong on this machine: its {name} differs from the reference by "
                f"{error:.2g} of the largest value. Nothing was trained; please report torch's version and the device"
            )


def _run(function: Any, inputs: list[Tensor], layout: TreeLayout, size: int) -> list[Tensor]:
    """Output and gradients of all inputs, float32."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, layout, size**-0.5, None)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    gradients = torch.autograd.grad(out, leaves, weights)
    return [x.detach().float() for x in (out, *gradients)]
