"""AdamW on a policy's flat vector, and its state in a checkpoint.

Where several processes train together, each holds the moments of its own part of the vector, updates that part, and
sends it to the others (ZeRO stage 1, Rajbhandari et al., arXiv 1910.02054). Gradients are summed before, so all parts
are updated as one process would update them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from art.config import OptimizerConfig
from art.errors import TrainingError
from art.trainer.distributed import ALONE, Team
from art.trainer.policy.policy import Policy
from art.trainer.tensor_files import PIECE_BYTES, file_order, make_header, read_named, stream_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Running means of the gradient and of its square, as torch names them."""
_ALIGNMENT = 256
"""The part of each process begins at a multiple of this, so that vector instructions round as in one process."""


class Optimizer:
    """AdamW, Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), on `policy.values`."""

    def __init__(self, policy: Policy, team: Team = ALONE) -> None:
        self._values, self._grads, self._team = policy.values, policy.grads, team
        self._like = {f"{moment}.{name}": tensor for moment in MOMENTS for name, tensor in policy.tensors.items()}
        """Names, shapes and number type of the moments in the file."""
        ends = list(accumulate(tensor.numel() for tensor in policy.tensors.values()))
        self._places = dict(zip(policy.tensors, pairwise([0, *ends]), strict=True))
        """Where each trained tensor begins and ends in the vector."""
        size = policy.values.numel()
        part = math.ceil(size / team.size / _ALIGNMENT) * _ALIGNMENT
        self._borders = [*(min(size, part * rank) for rank in range(team.size)), size]
        """Process r updates the numbers from `_borders[r]` up to `_borders[r + 1]`."""
        self._start, self._end = self._borders[team.rank], self._borders[team.rank + 1]
        self._own = torch.nn.Parameter(policy.values[self._start : self._end])  # shares its memory
        self._own.grad = policy.grads[self._start : self._end]
        self._adam = torch.optim.AdamW([self._own], foreach=False)
        self.reset()

    def reset(self) -> None:
        """Forget all updates: set the moments to zero."""
        zeros = {moment: torch.zeros_like(self._own.data) for moment in MOMENTS}
        self._adam.state[self._own] = {"step": torch.tensor(0.0), **zeros}

    @property
    def num_updates(self) -> int:
        return int(self._state["step"].item())

    @property
    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._adam.state[self._own]
        return state

    def update(self, learning_rate: float, config: OptimizerConfig) -> float:
        """Update the weights from the accumulated gradient. Returns the norm of the gradient before clipping.

        Raises:
            TrainingError: the gradient is not finite; nothing was changed.
        """
        norm = float(torch.linalg.vector_norm(self._grads))
        if not math.isfinite(norm):
            raise TrainingError(
                "the gradient is not finite, so nothing was trained; look at the learning rate, the rewards and the "
                "sampling log-probs of this step"
            )
        if norm > config.max_grad_norm:
            self._grads.mul_(config.max_grad_norm / norm)
        group = self._adam.param_groups[0]
        group.update(lr=learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
        self._adam.step()
        for rank in range(self._team.size):
            self._team.send(self._values[self._borders[rank] : self._borders[rank + 1]], rank)
        return norm

    def stream(self) -> Iterator[bytes | memoryview]:
        """Yield the content of `optimizer.safetensors`, piece by piece: both moments of every trained tensor.

        Every process must run it to the end, because each sends its part to the others. All yield the same bytes.
        """
        yield make_header(self._like)
        size = PIECE_BYTES // self._values.element_size()
        for name in file_order(self._like):
            moment, _, trained = name.partition(".")
            first, last = self._places[trained]
            # Pieces that one process holds. It sends each to the others, so that all of them can yield it.
            cuts = sorted({first, last, *range(first, last, size), *(b for b in self._borders if first < b < last)})
            for start, end in pairwise(cuts):
                owner = bisect_right(self._borders, start) - 1
                if owner == self._team.rank:
                    piece = self._state[moment][start - self._start : end - self._start]
                else:
                    piece = torch.empty(end - start, device=self._values.device)
                self._team.send(piece, owner)
                yield from stream_tensor(piece)

    def load(self, file: Path, num_updates: int) -> None:
        """Continue from the moments in `file`, which are those after `num_updates` updates.

        Raises:
            AdapterError: the moments do not fit this policy.
        """
        for name, tensor in read_named(file, self._like, "optimizer"):
            moment, _, trained = name.partition(".")
            first, last = self._places[trained]
            start, end = max(first, self._start), min(last, self._end)
            if start < end:
                numbers = tensor.reshape(-1)[start - first : end - first]
                self._state[moment][start - self._start : end - self._start] = numbers
        self._state["step"].fill_(num_updates)
