"""What every loss returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    values: Tensor  # [N] loss of each target, differentiable in its policy log-prob
    masked: Tensor  # [N] booleans: the loss dropped this target or clipped its gradient away
