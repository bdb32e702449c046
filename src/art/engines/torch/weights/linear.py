"""Linear layers that serve several adapters in one batch.

Rows of a batch are ordered by adapter, so that each adapter owns one contiguous run of rows and costs one pair of small
matrix products per layer. Rows in no run get the base weights alone. An adapter that has whole batches to itself can be
folded into a copy of the weights (see `folding`), and then costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from art.engine import AdapterInfo
from art.kernels.packed_linear import MIN_ELEMENTS, pack, packed_linear, packing_pays

_ROWS = 64
"""Rows that packed weights are laid out for: requests of a busy decoding step."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The low-rank update of one linear layer, `x @ a @ b`, scale included."""

    a: Tensor  # [in, R]
    b: Tensor  # [R, out]


@dataclass(slots=True, eq=False)
class Adapter:
    """Loaded LoRA weights. Never changed once made: a name that is loaded again gets a new `Adapter`."""

    uid: int
    """Unique for the life of the engine; KV entries belong to it. The base model has 0."""
    factors: list[Factors | None]  # by `Linear.index`
    info: AdapterInfo
    num_users: int = 0
    """Requests that wait or run with it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `[start, end)` of a batch, all of one adapter."""

    start: int
    end: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class Part:
    """Where one Hugging Face linear layer lives: output columns `[start, end)` of `linear`."""

    linear: Linear
    start: int
    end: int


class Linear:
    """`y = x W^T + bias`, plus the adapters of the rows. May hold several fused layers side by side."""

    __slots__ = ("_folded", "bias", "index", "is_packed", "num_in", "num_out", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, index: int) -> None:
        self.weight = weight  # [out, in], in oneDNN's order once packed
        self.bias = bias
        self.index = index
        self.is_packed = False
        self.num_out, self.num_in = weight.shape
        self._folded = weight

    def __call__(self, x: Tensor, runs: list[Run] | None) -> Tensor:
        """[N, in] -> [N, out]; `runs` None means that every row is the folded adapter's."""
        if runs is None:
            return self._product(x, self._folded)
        y = self._product(x, self.weight)
        add_adapters(x, y, runs, self.index)
        return y

    def pack(self) -> None:
        """Reorder the weight for oneDNN and let go of the plain one."""
        self.weight = self._folded = pack(self.weight, _ROWS)
        self.is_packed = True

    def fold(self, factors: Factors | None) -> None:
        """Keep W + (a b)^T beside W; without `factors` W itself serves."""
        self._folded = self.weight
        if factors is not None:
            plain = self.weight.to_dense() if self.is_packed else self.weight
            folded = torch.addmm(plain, factors.b.T, factors.a.T)
            self._folded = pack(folded, _ROWS) if self.is_packed else folded

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.is_packed:
            return packed_linear(x, weight, self.bias)
        return F.linear(x, weight, self.bias)


def add_adapters(x: Tensor, y: Tensor, runs: list[Run], index: int) -> None:
    """Add each run's low-rank update to its rows of `y` [N, out], in place."""
    for run in runs:
        factors = run.adapter.factors[index]
        if factors is not None:
            rows = slice(run.start, run.end)
            y[rows].addmm_(x[rows] @ factors.a, factors.b)


class RunContext:
    """The runs of the batch that is now computed; shared by all `AdaptedLinear`s of one model."""

    __slots__ = ("head_runs", "num_rows", "runs")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.head_runs: list[Run] = []
        self.num_rows: int | None = None
        """Rows that a layer must see for adapters to be placed; `None` switches the check off."""


class AdaptedLinear(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Stands in for an `nn.Linear` inside a Hugging Face model, which cannot pass `runs` down to it."""

    def __init__(self, base: nn.Linear, index: int, context: RunContext, *, is_head: bool) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.index = index
        self.sees_all_rows = False
        """Set by a trial forward pass: its input has one row per token of the batch, in order."""
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


def pack_where_faster(linears: list[Linear]) -> int:
    """Pack the layers whose shape measures faster that way; returns how many."""
    chosen = [linear for linear in linears if _pays_to_pack(linear.weight)]
    for linear in chosen:
        linear.pack()
    return len(chosen)


def _pays_to_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() < MIN_ELEMENTS:
        return False
    num_threads = torch.get_num_threads()
    return packing_pays(*weight.shape, num_rows=_ROWS, num_threads=num_threads, dtype=weight.dtype, backward=False)
