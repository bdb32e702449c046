"""The interface of a policy that is trained: weights on a base model, kept in flat vectors."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from art.config import LoraConfig
from art.storage.checkpoints import Content
from art.trainer.policy.base_model import FrozenModel, run_backbone
from art.trainer.tree_attention import TreeLayout


class Policy(ABC):
    """The policy that is trained: a `LoraPolicy` or a `FullPolicy`.

    All trained tensors are views of one flat float32 vector, and so are their gradients. So the gradient norm, the
    check for non-finite numbers, the optimiser and the sum over processes each handle one tensor.
    """

    base: FrozenModel
    config: LoraConfig | None
    """`None` for full fine-tuning: all weights of the decoder layers and the final norm."""
    values: Tensor  # [P]
    grads: Tensor  # [P]
    tensors: dict[str, Tensor]
    """Trained tensors as views of `values`, named as in the weights file of a checkpoint."""

    weights_file: ClassVar[str]
    """Name of the file with the weights in a checkpoint."""

    @property
    def trained_model(self) -> Any:
        """The Hugging Face model whose layers run the policy."""
        return self.base.model

    def _allocate(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Create `values`, `grads` and `tensors` like these trained tensors; return views of `grads` by name."""
        size = sum(tensor.numel() for tensor in like.values())
        self.values, self.grads = (torch.zeros(size, device=self.base.device) for _ in range(2))
        self.tensors = named_views(self.values, like)
        return named_views(self.grads, like)

    @abstractmethod
    def reset(self) -> None:
        """Go back to step 0, where the policy equals the base model."""

    @abstractmethod
    def files(self) -> dict[str, Content]:
        """Return the files of a checkpoint by name: `weights_file`, and what other programs need to load it."""

    @abstractmethod
    def load(self, file: Path) -> None:
        """Load a `weights_file`. It must hold every tensor, in the right shape, and no other.

        Raises:
            AdapterError: the tensors do not fit this model and configuration.
        """

    @contextlib.contextmanager
    def using(self, file: Path) -> Iterator[None]:
        """Use the weights of another checkpoint's `weights_file` inside the block.

        Raises:
            AdapterError: the weights do not fit this model and configuration.
        """
        own = self.values.clone()
        try:
            self.load(file)
            yield
        finally:
            self.values.copy_(own)

    @abstractmethod
    def norm(self) -> float:
        """Return the Frobenius norm of the change of all weights since step 0, as an engine serves them."""

    @abstractmethod
    def hidden_states(self, layout: TreeLayout) -> Tensor:
        """Compute the policy's final hidden states [T, H] of a layout, differentiable inside `accumulate_gradients`."""

    def base_hidden_states(self, layout: TreeLayout) -> Tensor:
        """Compute the base model's final hidden states [T, H] of a layout."""
        return run_backbone(self.base, layout)

    @abstractmethod
    def accumulate_gradients(self) -> AbstractContextManager[None]:
        """Return a context manager that adds up the gradients of all backward passes in its block, in `grads`."""

    def remove(self) -> None:  # noqa: B027  # nothing to do for a policy that leaves the base model as it is
        """Restore the base model to how it was loaded. The policy cannot be used afterwards."""


def named_views(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split `flat` [P] into views with the names and shapes of `like`, in its order."""
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}
