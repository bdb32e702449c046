"""RMS norm. On the CPU torch computes it by eight operators; in float32 four small ones do."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


class RmsNorm:
    """The function `x / sqrt(mean(x^2) + eps) * weight` of the last axis of x, of size d.

    In float32 on the CPU it is computed as `x / hypot(|x|, sqrt(d eps)) * (sqrt(d) weight)`, which is the same up to
    rounding. Elsewhere torch's own operator is used: one kernel, which rounds 16-bit numbers as models expect.
    """

    __slots__ = ("_eps", "_floor", "_is_split", "_scaled", "_size", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight` is [d], or [heads, d] with one row for each head of x [N, heads, d]."""
        self._weight, self._eps, self._size = weight, eps, weight.shape[-1]
        self._is_split = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._scaled = weight * math.sqrt(self._size)
        self._floor = weight.new_tensor(math.sqrt(eps * self._size))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]"""
        if self._is_split:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / length.hypot_(self._floor)).mul_(self._scaled)
        if self._weight.dim() == 1:
            return F.rms_norm(x, (self._size,), self._weight, self._eps)
        return F.rms_norm(x, (self._size,), None, self._eps) * self._weight
