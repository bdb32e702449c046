"""Linear layers that serve several adapters in one batch.

Rows of a batch are ordered by adapter, so each adapter has one contiguous run of rows and takes one pair of small
matrix products per layer. Rows in no run use the base weights alone. An adapter that fills whole batches can be folded
into a copy of the weights (see `llama.Folding`), and then costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from art.engine import AdapterInfo


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The low-rank update of one linear layer, `x @ a @ b`, including its scale."""

    a: Tensor  # [in, R]
    b: Tensor  # [R, out]


@dataclass(slots=True, eq=False)
class Adapter:
    """Loaded LoRA weights. They never change: loading a name again makes a new `Adapter`."""

    uid: int
    """Number of the adapter, unique in the engine. KV cache entries refer to it. The base model has 0."""
    factors: list[Factors | None]  # by `Linear.index`
    info: AdapterInfo
    num_users: int = 0
    """Number of waiting or running requests that use it."""


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Rows `[start, end)` of a batch, which use one adapter."""

    start: int
    end: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One linear layer of the Hugging Face model, computed as the output columns `[start, end)` of `linear`."""

    linear: Linear
    start: int
    end: int


class Linear:
    """A linear layer `y = x W^T + bias` plus the adapters of the rows. It may be several layers, fused side by side."""

    __slots__ = ("_folded", "bias", "index", "num_in", "num_out", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, index: int) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias
        self.index = index
        self.num_out, self.num_in = weight.shape
        self._folded = weight

    def __call__(self, x: Tensor, runs: list[AdapterRun] | None, residual: Tensor | None = None) -> Tensor:
        """[N, in] -> [N, out], plus `residual` [N, out]. `runs` is `None` if all rows use the folded adapter."""
        if runs is None:
            return self._product(x, self._folded, residual)
        y = self._product(x, self.weight, residual)
        add_adapters(x, y, runs, self.index)
        return y

    def fold(self, factors: Factors | None) -> None:
        """Store W + (a b)^T in addition to W, for batches of this one adapter. Without `factors` it is W itself."""
        self._folded = self.weight if factors is None else torch.addmm(self.weight, factors.b.T, factors.a.T)

    def _product(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
        if residual is not None and self.bias is None:
            return torch.addmm(residual, x, weight.t())
        y = F.linear(x, weight, self.bias)
        return y if residual is None else y.add_(residual)


def add_adapters(x: Tensor, y: Tensor, runs: list[AdapterRun], index: int) -> None:
    """Add the low-rank update of each run to its rows of `y` [N, out], in place."""
    for run in runs:
        factors = run.adapter.factors[index]
        if factors is not None:
            rows = slice(run.start, run.end)
            y[rows].addmm_(x[rows] @ factors.a, factors.b)


@dataclass(slots=True)
class RunContext:
    """The runs of the current batch, shared by all `HfLinear` layers of a model."""

    runs: list[AdapterRun] = field(default_factory=list)
    head_runs: list[AdapterRun] = field(default_factory=list)
    num_rows: int | None = None
    """Number of rows of a trial batch. `None` outside of a trial: layers then do not record what they see."""


class HfLinear(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Replaces an `nn.Linear` inside a Hugging Face model. It reads the runs from `context`."""

    def __init__(self, base: nn.Linear, index: int, context: RunContext, *, is_head: bool) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.index = index
        self.sees_all_rows = False
        """Whether the input had one row per token of the batch. Set by a trial forward pass."""
        self._context = context
        self._is_head = is_head

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        context = self._context
        if context.num_rows is not None:
            self.sees_all_rows = x.numel() // x.shape[-1] == context.num_rows
        runs = context.head_runs if self._is_head else context.runs
        if runs:
            add_adapters(x.reshape(-1, self.in_features), y.view(-1, self.out_features), runs, self.index)
        return y
