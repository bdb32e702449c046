"""Adam's two moments of a vector of trained numbers, in float32 or in 8 bits, and the update that uses them.

In 8 bits, 256 neighbours share the largest absolute value among them, and each is stored as one of 256 fractions of it
(Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861). The fractions lie densely near zero
over seven powers of ten, because moments of one block differ that much. That takes 2.03 bytes per number instead of 8.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import pad

from art.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Running means of the gradient and of its square, as torch names them."""
BLOCK = 256
"""Numbers that share a scale. The paper uses 2048, and the authors' library 256, which is more exact."""
_CHUNK = 2**14
"""Blocks that are decoded at a time, so that only 16 MB per moment are in float32."""


class Moments(ABC):
    """Both moments of `values` [P], and their AdamW update by `grads` [P]."""

    num_updates: int

    @abstractmethod
    def reset(self) -> None:
        """Forget all updates."""

    @abstractmethod
    def update(self, learning_rate: float, config: OptimizerConfig) -> None:
        """Update the moments from the gradient, and the values from the moments."""

    @abstractmethod
    def read(self, moment: str, start: int, end: int) -> Tensor:
        """Return the float32 numbers from `start` to `end` of a moment."""

    @abstractmethod
    def store(self, moment: str, numbers: Tensor) -> None:
        """Replace a moment by `numbers` [P]."""


class FloatMoments(Moments):
    """Moments in float32, updated by torch."""

    def __init__(self, values: Tensor, grads: Tensor) -> None:
        self._parameter = torch.nn.Parameter(values)  # shares its memory
        self._parameter.grad = grads
        self._adam = torch.optim.AdamW([self._parameter], foreach=False)
        self.reset()

    @property
    def num_updates(self) -> int:
        return int(self._state["step"].item())

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._state["step"].fill_(number)

    def reset(self) -> None:
        zeros = {moment: torch.zeros_like(self._parameter.data) for moment in MOMENTS}
        self._adam.state[self._parameter] = {"step": torch.tensor(0.0), **zeros}

    def update(self, learning_rate: float, config: OptimizerConfig) -> None:
        group = self._adam.param_groups[0]
        group.update(lr=learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
        self._adam.step()

    def read(self, moment: str, start: int, end: int) -> Tensor:
        return self._state[moment][start:end]

    def store(self, moment: str, numbers: Tensor) -> None:
        self._state[moment].copy_(numbers)

    @property
    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._adam.state[self._parameter]
        return state


class BlockMoments(Moments):
    """Moments in 8 bits, decoded and updated some blocks at a time."""

    def __init__(self, values: Tensor, grads: Tensor) -> None:
        self._values, self._grads = values, grads
        shape, device = (math.ceil(len(values) / BLOCK), BLOCK), values.device
        self._codes = {moment: torch.zeros(shape, dtype=torch.uint8, device=device) for moment in MOMENTS}
        self._scales = {moment: torch.zeros(shape[0], 1, device=device) for moment in MOMENTS}
        self._tables = {moment: make_table(signed=moment == MOMENTS[0]).to(device) for moment in MOMENTS}
        self.reset()

    def reset(self) -> None:
        self.num_updates = 0
        for moment, table in self._tables.items():
            self._codes[moment].fill_(int(table.abs().argmin()))  # the code of zero
            self._scales[moment].zero_()

    def update(self, learning_rate: float, config: OptimizerConfig) -> None:
        self.num_updates += 1
        beta1, beta2 = config.betas
        step_size = learning_rate / (1 - beta1**self.num_updates)
        correction = math.sqrt(1 - beta2**self.num_updates)
        for first in range(0, len(self._scales[MOMENTS[0]]), _CHUNK):
            blocks = slice(first, first + _CHUNK)
            numbers = slice(first * BLOCK, (first + _CHUNK) * BLOCK)
            values, grad = self._values[numbers], self._grads[numbers]
            mean, square = (self._decode(moment, blocks).view(-1)[: len(values)] for moment in MOMENTS)
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            values.mul_(1 - learning_rate * config.weight_decay)
            values.addcdiv_(mean, (square.sqrt() / correction).add_(config.eps), value=-step_size)
            for moment, new in zip(MOMENTS, (mean, square), strict=True):
                self._encode(moment, blocks, new)

    def read(self, moment: str, start: int, end: int) -> Tensor:
        first, last = start // BLOCK, math.ceil(end / BLOCK)
        return self._decode(moment, slice(first, last)).view(-1)[start - first * BLOCK : end - first * BLOCK]

    def store(self, moment: str, numbers: Tensor) -> None:
        for first in range(0, len(self._scales[moment]), _CHUNK):
            chunk = numbers[first * BLOCK : (first + _CHUNK) * BLOCK]
            self._encode(moment, slice(first, first + _CHUNK), chunk)

    def _decode(self, moment: str, blocks: slice) -> Tensor:  # [blocks, BLOCK]
        return self._tables[moment][self._codes[moment][blocks].int()] * self._scales[moment][blocks]

    def _encode(self, moment: str, blocks: slice, numbers: Tensor) -> None:
        """Store each number as the nearest code. A mean square that is not zero never becomes zero.

        Else the update would divide by `eps` alone where a gradient stops.
        """
        table = self._tables[moment]
        rows = pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)
        scales = rows.abs().amax(1, keepdim=True)
        codes = torch.bucketize(rows / scales.clamp(min=torch.finfo(torch.float32).tiny), (table[1:] + table[:-1]) / 2)
        if moment == MOMENTS[1]:
            codes.clamp_(min=(rows > 0).to(codes.dtype))
        self._codes[moment][blocks] = codes.to(torch.uint8)
        self._scales[moment][blocks] = scales


def make_table(*, signed: bool) -> Tensor:
    """Return the 256 fractions that an 8-bit number can be, ascending: [256], from -1 or 0 to 1.

    They are the paper's dynamic data type: between two powers of ten from 1e-7 to 1 lie twice as many as between the
    two below. Where numbers have signs, -1 takes the place of the smallest negative one. So the largest number of a
    block is exact, and encoding what was decoded changes nothing.
    """
    fractions: list[float] = []
    for power in range(7):
        count = 2**power if signed else 2 ** (power + 1)
        width = 0.9 / count
        fractions += [10.0 ** (power - 6) * (0.1 + width * (number + 0.5)) for number in range(count)]
    negative = [-1.0, *(-fraction for fraction in fractions[1:])] if signed else []
    return torch.tensor(sorted([*negative, 0.0, *fractions, 1.0]))
