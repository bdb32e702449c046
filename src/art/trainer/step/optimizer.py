"""AdamW on a policy's flat vector, and its state in a checkpoint."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from art.config import OptimizerConfig
from art.errors import TrainingError
from art.trainer.policy.policy import Policy, named_views
from art.trainer.tensor_files import copy_named, dump_named


class Optimizer:
    """AdamW, Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), on `policy.values`."""

    def __init__(self, policy: Policy) -> None:
        self._grads = policy.grads
        self._parameter = torch.nn.Parameter(policy.values)  # shares its memory
        self._parameter.grad = policy.grads
        self._adam = torch.optim.AdamW([self._parameter], foreach=False)
        self._tensors = policy.tensors
        self.reset()

    def reset(self) -> None:
        """Forget all updates: set the moments to zero."""
        first, second = (torch.zeros_like(self._parameter.data) for _ in range(2))
        self._adam.state[self._parameter] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}

    @property
    def num_updates(self) -> int:
        return int(self._state["step"].item())

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
        return norm

    def dump(self) -> bytes:
        """Return the content of `optimizer.safetensors`: both moments of every trained tensor."""
        return dump_named(self._named_moments())

    def load(self, data: bytes, num_updates: int) -> None:
        """Continue from the moments in `data`, which are those after `num_updates` updates.

        Raises:
            AdapterError: the moments do not fit this policy.
        """
        self.reset()
        copy_named(data, self._named_moments(), "optimizer")
        self._state["step"].fill_(num_updates)

    @property
    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._adam.state[self._parameter]
        return state

    def _named_moments(self) -> dict[str, Tensor]:
        """Views of the flat moments as `<moment>.<trained tensor>`."""
        return {
            f"{moment}.{name}": view
            for moment in ("exp_avg", "exp_avg_sq")
            for name, view in named_views(self._state[moment], self._tensors).items()
        }
