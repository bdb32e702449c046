"""Compiled FlexAttention: one function for each kind of layer, each with few graphs, and never the uncompiled one.

torch.compile makes a graph for each set of shapes and flags that it meets and counts the graphs of a function. Above
the limit (8 by default) torch runs the function uncompiled and only logs a warning; FlexAttention then materialises all
scores, 34 GB at 16,384 tokens and 32 heads in float32. So

- each kind of layer, `FlexKind`, has a function of its own, which compiles a graph for the first length and one for all
  others: flags and numbers that would need more graphs are part of the kind or made equal before the call;
- the limit is raised for these functions;
- hitting it, or running uncompiled for any other reason, is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from art.errors import TrainingError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_GRAPHS = 32
"""Most graphs that a compiled function may have. A model uses two of each."""


@dataclass(frozen=True, slots=True)
class FlexKind:
    """What is fixed in a compiled function."""

    window: int | None
    """Sliding window, which is a number in the code of the block mask's rule."""
    scale: float
    needs_grad: bool
    returns_lse: bool
    """Whether the log-sum-exp of the scores is returned too, for sinks."""


def run_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, kind: FlexKind, *, compiles: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with a block mask: output [1, H, T, E], and the log-sum-exp [1, H, T] if `kind` asks for it.

    query [1, H, T, D], key [1, G, T, D], value [1, G, T, E]. Without `compiles` all scores are materialised, which
    suits only small layouts.

    Raises:
        TrainingError: torch did not compile the function, or compiled it more than `MAX_GRAPHS` times.
    """
    # torch compiles once more for each combination of inputs that require a gradient and of inputs that are views. So
    # all three require one or none does, and none is a view.
    query, key, value = (
        _Plain.apply(x) if x.requires_grad and kind.needs_grad else x.detach().requires_grad_(kind.needs_grad)
        for x in (query, key, value)
    )
    with torch.set_grad_enabled(kind.needs_grad):
        if not compiles:
            return _call_flex(query, key, value, mask, kind)
        with _failing_loudly(kind):
            out, lse = compiled_function(kind)(query, key, value, mask)
    return out, lse


@cache
def compiled_function(kind: FlexKind) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the compiled function of a kind. Compilation happens when it is called."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        if not torch.compiler.is_compiling():  # the compiler leaves this branch out
            raise TrainingError(
                "FlexAttention ran without being compiled, which would materialise all attention scores. Something "
                "turned torch.compile off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE or torch.compiler.set_stance): "
                "remove it"
            )
        return _call_flex(query, key, value, mask, kind)

    # torch counts graphs by code object, which all closures of `attend` share; the name appears in torch's logs.
    name = f"flex_window_{kind.window}_{'grad' if kind.needs_grad else 'no_grad'}"
    attend.__code__ = attend.__code__.replace(co_name=name)
    function: Callable[..., tuple[Tensor, Tensor | None]] = torch.compile(attend, fullgraph=True)
    return function


class _Plain(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Return a tensor with the same memory that autograd does not take for a view of another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@contextlib.contextmanager
def _failing_loudly(kind: FlexKind) -> Iterator[None]:
    import torch._dynamo.config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
            yield
    except FailOnRecompileLimitHit as error:  # `fullgraph` makes it an error
        raise TrainingError(
            f"torch compiled FlexAttention {MAX_GRAPHS} times for layers with window {kind.window}, and each time for "
            "other shapes or flags; expected about 2. Run with TORCH_LOGS=recompiles to see what changes, and report it"
        ) from error


def _call_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, kind: FlexKind
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    options: dict[str, Any] = {
        "block_mask": mask,
        "scale": kind.scale,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if not kind.returns_lse:
        return flex_attention(query, key, value, **options), None
    out, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True), **options)
    return out, aux.lse
