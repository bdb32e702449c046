"""Linear layers that serve several adapters in one batch.

Rows of a batch are ordered by adapter, so that each adapter owns one contiguous run of rows and costs one pair of small
matrix products per layer. Rows in no run get the base weights alone. An adapter that has whole batches to itself can be
folded into a copy of the weights (see `folding`), and then costs nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from art.engine import AdapterInfo

logger = logging.getLogger(__name__)

_MIN_PACKED_ELEMENTS = 1 << 16  # smaller weights live in the caches, and packing gains nothing
_PACK_BATCH_HINT = 64
_MIN_PACKED_GAIN = 1.1


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
        self.weight = self._folded = _reorder(self.weight)
        self.is_packed = True

    def fold(self, factors: Factors | None) -> None:
        """Keep W + (a b)^T beside W; without `factors` W itself serves."""
        self._folded = self.weight
        if factors is not None:
            plain = self.weight.to_dense() if self.is_packed else self.weight
            folded = torch.addmm(plain, factors.b.T, factors.a.T)
            self._folded = _reorder(folded) if self.is_packed else folded

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, weight, self.bias, "none", [], "")
        return F.linear(x, weight, self.bias)


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_BATCH_HINT)


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
    """Pack the layers whose shape measures faster that way; returns how many.

    The operators are private to torch, so they are tried and compared first; without them nothing is packed.
    """
    decided: dict[tuple[int, int], bool] = {}
    num_packed = 0
    for linear in linears:
        weight = linear.weight
        if weight.device.type != "cpu" or weight.numel() < _MIN_PACKED_ELEMENTS:
            continue
        shape = (linear.num_out, linear.num_in)
        if shape not in decided:
            decided[shape] = _packing_pays(weight)
        if decided[shape]:
            linear.pack()
            num_packed += 1
    return num_packed


def _packing_pays(weight: Tensor) -> bool:
    x = torch.randn(_PACK_BATCH_HINT // 2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        packed = _reorder(weight)
        got = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("oneDNN packed weights are not available here: %s", error)
        return False
    want = F.linear(x, weight)
    if not torch.allclose(got.float(), want.float(), rtol=1e-2, atol=1e-2 * float(want.abs().max())):
        logger.warning("oneDNN packed weights of shape %s give other results; not used", tuple(weight.shape))
        return False
    plain_s = _best_time_s(lambda: F.linear(x, weight))
    packed_s = _best_time_s(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return plain_s > packed_s * _MIN_PACKED_GAIN


def _best_time_s(call: Callable[[], Tensor], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
