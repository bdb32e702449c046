"""Choose the attention kernel for a prefix tree's layout by its size and the device.

    up to 256 tokens             dense
    more, on the CPU             blocks
    above 1,024 tokens on CUDA   flex, if it can be compiled
    else                         dense

A model that runs one sequence at a time keeps its own attention. Each kernel is compared with the reference on the
first batch that uses it, before anything is trained with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art.errors import TrainingError
from art.kernels.layer_kinds import head_dims, layer_settings
from art.protocol.samples import plain_sample
from art.trainer.policy.base_model import FrozenModel
from art.trainer.tree import SamplePath, build_tree, check_sample
from art.trainer.tree_attention import (
    KERNELS,
    AttentionFormula,
    KernelName,
    TreeLayout,
    attend_dense,
    make_layout,
)

_log = logging.getLogger(__name__)

_DENSE_UP_TO = 256
"""Up to about two blocks of queries, a single call computes few scores in vain."""
_DENSE_ON_CUDA_UP_TO = 1024
"""Small layouts are fast with any kernel there, and not worth compiling one."""

_NUM_COMPLETIONS = 8


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Properties of a model that an attention kernel depends on."""

    num_heads: int
    num_groups: int
    """Number of heads of keys and values."""
    size: int
    value_size: int
    """Size of a value. In multi-head latent attention (DeepSeek, Kimi) it is smaller than the size of a key."""
    dtype: torch.dtype
    device: torch.device
    has_sinks: bool = False

    @classmethod
    def of(cls, base: FrozenModel) -> HeadShape:
        model: Any = base.model
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        sizes = head_dims(model.config)
        size = value_size = max(sizes)
        if getattr(config, "qk_nope_head_dim", None) is not None:
            size, value_size = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        return cls(
            num_heads=num_heads,
            num_groups=layer_settings(model.config, "num_key_value_heads")[sizes.index(size)] or num_heads,
            size=size,
            value_size=value_size,
            dtype=base.head.weight.dtype,
            device=base.device,
            has_sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        )

    def random_inputs(self, num_tokens: int) -> list[torch.Tensor]:
        """Make query [1, H, T, D], key [1, G, T, D], value [1, G, T, E] and maybe sinks [H] from one fixed seed.

        Heads of a token lie side by side in memory, as models have them, so that flex is not compiled once more.
        """
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        rows = [(self.num_heads, self.size), (self.num_groups, self.size), (self.num_groups, self.value_size)]
        inputs = [make(1, num_tokens, count, size).transpose(1, 2) for count, size in rows]
        return [*inputs, make(self.num_heads)] if self.has_sinks else inputs


def choose_kernel(base: FrozenModel, num_tokens: int) -> KernelName:
    """Choose the attention kernel for a layout of `num_tokens` tokens."""
    if base.one_by_one:
        return "own"
    if num_tokens <= _DENSE_UP_TO:
        return "dense"
    if base.device.type == "cuda" and num_tokens > _DENSE_ON_CUDA_UP_TO:
        return "flex" if can_run_flex(HeadShape.of(base)) else "dense"
    return "blocks" if base.device.type == "cpu" else "dense"


@cache
def can_run_flex(heads: HeadShape) -> bool:
    """Whether FlexAttention can be compiled here, which takes seconds at the first call.

    Raises:
        TrainingError: torch.compile is turned off, or compiled flex too often.
    """
    try:
        for num_tokens in (_DENSE_ON_CUDA_UP_TO, 2 * _DENSE_ON_CUDA_UP_TO):  # two, so that any length is compiled for
            layout = example_layout(num_tokens, heads.device)
            with torch.enable_grad():
                _run(KERNELS["flex"], heads.random_inputs(len(layout.token_ids)), layout, heads.size)
    except TrainingError:
        raise
    except Exception as error:  # from a compiler: Triton, a C compiler or support for this head size is missing
        _log.warning("FlexAttention cannot run here, so memory grows with the square of a layout: %r", error)
        return False
    return True


def example_layout(num_tokens: int, device: torch.device) -> TreeLayout:
    """Make a layout of about `num_tokens` tokens: half of them a shared prompt, the other half its completions."""
    answer = max(1, num_tokens // (2 * _NUM_COMPLETIONS))
    prompt = max(1, num_tokens - answer * _NUM_COMPLETIONS)
    ends = prompt + answer * np.arange(1, _NUM_COMPLETIONS + 1)
    completion = prompt + np.arange(answer)
    positions = torch.from_numpy(np.concatenate([np.arange(prompt), np.tile(completion, _NUM_COMPLETIONS)])).to(device)
    subtree_end = np.concatenate([np.full(prompt, ends[-1]), np.repeat(ends, answer)])
    return TreeLayout(
        token_ids=positions,
        positions=positions,
        subtree_end=torch.from_numpy(subtree_end).to(device),
        kernel="dense",
    )


_MAX_TOKENS = 1024
"""Most tokens to compare on. The reference needs memory for all pairs of tokens."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest allowed error, as a share of the largest number. Rounding stays well below; a wrong key gives about 1."""


def check_kernel(base: FrozenModel, kernel: KernelName, paths: Sequence[SamplePath]) -> None:
    """Compare an attention kernel with the dense reference: outputs and gradients, on the first samples of `paths`.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    if kernel in ("dense", "own"):
        return
    ends = accumulate(path.num_tokens for path in paths)
    chosen = [path for path, end in zip(paths, ends, strict=True) if end <= _MAX_TOKENS]
    if not chosen:  # the reference cannot hold even the first one: take its beginning
        beginning = plain_sample(list(paths[0].sample.token_ids[:_MAX_TOKENS]), "kernel-check")
        chosen = [path for path in [check_sample(beginning, vocab_size=base.vocab_size)] if path is not None]
    layout = make_layout(build_tree(chosen), device=base.device, kernel=kernel)
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


def _run(function: Any, inputs: list[Tensor], layout: TreeLayout, size: int) -> list[Tensor]:
    """Output of an attention function and the gradients of all inputs, in float32."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    query, key, value, *sinks = leaves
    out = function(query, key, value, layout, AttentionFormula(size**-0.5, sinks=sinks[0] if sinks else None))
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    gradients = torch.autograd.grad(out, leaves, weights)
    return [x.detach().float() for x in (out, *gradients)]
