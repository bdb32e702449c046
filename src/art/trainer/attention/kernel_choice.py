"""Choose the attention kernel for a prefix tree's layout by its size and the device; on CUDA by measuring.

    up to 256 tokens     dense
    more, on the CPU     chains
    more, on CUDA        dense or flex: the faster one, measured when the first layout of such a size comes
    more, elsewhere      dense

A model that runs one sequence at a time keeps its own attention.

What is measured is the forward and backward pass of one layer's attention over a made-up group of rollouts. The result
is kept in the process, by the shape of the model's heads and the size class of the layout (powers of 2).

Test an attention kernel on the first batch that uses it, before anything is trained with it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from art.errors import TrainingError
from art.kernels.layer_kinds import head_dims, layer_settings
from art.protocol.samples import plain_sample
from art.trainer.attention.tree_attention import KERNELS, Formula, KernelName, TreeLayout, attend_dense, make_layout
from art.trainer.machine.memory import is_out_of_memory, release_memory
from art.trainer.policy.base_model import BaseModel
from art.trainer.tree.tree import SamplePath, build_tree, check_sample

_log = logging.getLogger(__name__)

_DENSE_UP_TO = 256
"""Measured on a CPU with 4 heads of size 16: at 180 tokens dense takes 0.8 ms and chains 0.9 ms, at 390 tokens 3.0 and
2.1, at 1,900 tokens 73 and 10. On CUDA small layouts are fast with any kernel, and not worth compiling one."""

_SIZE_CLASSES: Final = (512, 1024, 2048, 4096, 8192, 16384)
"""Numbers of tokens at which kernels are timed. A layout belongs to the smallest size that holds it, or to the last."""

_CANDIDATES: Final[tuple[KernelName, ...]] = ("dense", "flex")
"""Kernels to compare on CUDA. If none can run, the first is used: smaller micro-batches will let it run."""

_NUM_COMPLETIONS = 8
_NUM_WARM_UPS, _NUM_PASSES = 2, 3


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Properties of a model that the time of an attention kernel depends on."""

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
    def of(cls, base: BaseModel) -> HeadShape:
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


def choose_kernel(base: BaseModel, num_tokens: int) -> KernelName:
    """Choose the attention kernel for a layout of `num_tokens` tokens.

    On CUDA the first call of a size class takes seconds, because kernels are measured.
    """
    if base.one_by_one:
        return "own"
    if num_tokens <= _DENSE_UP_TO:
        return "dense"
    if base.device.type == "cuda":
        return fastest_kernel(HeadShape.of(base), size_class(num_tokens))
    return "chains" if base.device.type == "cpu" else "dense"


def size_class(num_tokens: int) -> int:
    return next((size for size in _SIZE_CLASSES if num_tokens <= size), _SIZE_CLASSES[-1])


@cache
def fastest_kernel(heads: HeadShape, num_tokens: int) -> KernelName:
    """Return the CUDA attention kernel that takes least time. The first call measures, later ones return the same."""
    seconds = {kernel: time_kernel(kernel, heads, num_tokens) for kernel in _CANDIDATES}
    chosen = min(_CANDIDATES, key=lambda kernel: seconds[kernel])
    _log.info(
        "attention of %d heads of %d, layouts of about %d tokens: %s (%s)",
        heads.num_heads,
        heads.size,
        num_tokens,
        chosen,
        ", ".join(f"{kernel} {1e3 * s:.3g} ms" for kernel, s in seconds.items()),
    )
    return chosen


def time_kernel(kernel: KernelName, heads: HeadShape, num_tokens: int) -> float:
    """Measure the seconds of a forward and backward pass: infinite if memory runs out, or if flex does not compile.

    Raises:
        TrainingError: torch.compile is turned off, or compiled flex too often.
    """
    try:
        return _time_passes(kernel, heads, num_tokens)
    except TrainingError:  # flex is compiled too often, or not at all
        raise
    except Exception as error:  # from a compiler: Triton, a C compiler or support for this head size is missing
        is_memory = isinstance(error, RuntimeError) and is_out_of_memory(error)
        if kernel != "flex" and not is_memory:
            raise
        _log.warning(
            "the %r attention kernel cannot run %d tokens here: %s: %s", kernel, num_tokens, type(error).__name__, error
        )
    release_memory()
    return math.inf


def _time_passes(kernel: KernelName, heads: HeadShape, num_tokens: int) -> float:
    function, scale = KERNELS[kernel], heads.size**-0.5

    def run(layout: TreeLayout, inputs: list[torch.Tensor]) -> float:
        _finish(heads.device)
        start = time.perf_counter()
        query, key, value, *sinks = inputs
        out = function(query, key, value, layout, Formula(scale, sinks=sinks[0] if sinks else None))
        torch.autograd.grad(out, inputs, out)
        _finish(heads.device)
        return time.perf_counter() - start

    with torch.enable_grad():
        for size in (num_tokens // 2, num_tokens):  # two lengths, so that torch.compile compiles for any length
            layout = example_layout(size, heads.device)
            inputs = [x.requires_grad_() for x in heads.random_inputs(len(layout.token_ids))]
            for _ in range(_NUM_WARM_UPS):
                run(layout, inputs)
        return min(run(layout, inputs) for _ in range(_NUM_PASSES))


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
        chains=[],
        kernel="dense",
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
