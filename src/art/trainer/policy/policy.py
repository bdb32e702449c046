"""What a trainer trains: some of the weights, in flat vectors, and the base model that they started from."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

from torch import Tensor

from art.config import LoraConfig
from art.trainer.attention.tree_attention import TreeLayout
from art.trainer.policy.base_model import BaseModel


class Policy(ABC):
    """The policy that is trained, of one kind: `LoraPolicy` or `FullPolicy`.

    All trained numbers are views of one flat float32 vector, and so are their gradients: the gradient norm, the check
    for numbers that are not finite, the optimiser and the sum over processes each touch one tensor.
    """

    base: BaseModel
    config: LoraConfig | None
    """`None`: all weights of the decoder layers and the final norm are trained."""
    values: Tensor  # [P]
    grads: Tensor  # [P]
    tensors: dict[str, Tensor]
    """The views of `values`, named as in `weights_file`."""

    weights_file: ClassVar[str]
    """Its weights in a checkpoint."""
    trains_base_weights: ClassVar[bool]
    """Whether a backward pass has gradients of whole weights to compute."""

    @abstractmethod
    def reset(self) -> None:
        """The policy of step 0, which is the base model."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """What a checkpoint has of it: `weights_file`, and what is needed beside it to load that elsewhere."""

    @abstractmethod
    def load(self, data: bytes) -> None:
        """Take over the weights of `data`, a `weights_file`, strictly: every tensor, of the right shape, and no other.

        Raises:
            AdapterError: they do not fit this model and configuration.
        """

    @contextlib.contextmanager
    def using(self, data: bytes) -> Iterator[None]:
        """The weights of another checkpoint's `weights_file` inside the block; errors as of `load`."""
        own = self.values.clone()
        try:
            self.load(data)
            yield
        finally:
            self.values.copy_(own)

    @abstractmethod
    def norm(self) -> float:
        """Frobenius norm of what training has added to all weights together, as an engine serves them."""

    @abstractmethod
    def change_norm(self, before: Tensor) -> float:
        """Frobenius norm of what the weights together have changed by since `values` were `before` [P]."""

    @abstractmethod
    def hidden_states(self, layout: TreeLayout) -> Tensor:
        """Final hidden states [T, H] of a layout under the policy. Differentiable inside `accumulate_gradients`."""

    @abstractmethod
    def base_hidden_states(self, layout: TreeLayout) -> Tensor:
        """The same under the base model."""

    @abstractmethod
    def accumulate_gradients(self) -> AbstractContextManager[None]:
        """Backward passes inside add up; behind the block `grads` holds the gradient of their sum."""

    @abstractmethod
    def remove(self) -> None:
        """Leave the base model as it was loaded. The policy is of no use afterwards."""
