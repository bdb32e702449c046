"""Checkpoint a layer without its attention: the backward pass computes the layer again, but not the attention.

`torch.utils.checkpoint` runs a layer's forward pass a second time for the tensors that the backward pass needs. Under
the contexts of `keep_attention` the attention's own tensors are kept from the first time, and its output is used again
in the second. So the longest part at long contexts runs once, whatever kernel computes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class _Kept:
    """Outputs of the attention in one checkpointed layer, in the order of its calls."""

    outputs: list[Tensor] = field(default_factory=list)
    num_used: int | None = None
    """How many outputs the second forward pass has used; `None` during the first."""


_current: ContextVar[_Kept | None] = ContextVar("kept_attention", default=None)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for the first and the second forward pass: a `context_fn` of `torch.utils.checkpoint`."""
    kept = _Kept()
    return _recording(kept), _replaying(kept)


def attend_once(compute: Callable[[], Tensor]) -> Tensor:
    """Return `compute()`, or in the second forward pass of a checkpointed layer what it returned in the first."""
    kept = _current.get()
    if kept is None:
        return compute()
    if kept.num_used is not None:
        out = kept.outputs[kept.num_used]
        kept.num_used += 1
        return out.detach().requires_grad_(out.requires_grad)
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # these hide the hooks of the checkpoint
        out = compute()
    kept.outputs.append(out.detach().requires_grad_(out.requires_grad))
    return out


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def _recording(kept: _Kept) -> Iterator[None]:
    token = _current.set(kept)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def _replaying(kept: _Kept) -> Iterator[None]:
    kept.num_used = 0
    with _recording(kept):
        yield
