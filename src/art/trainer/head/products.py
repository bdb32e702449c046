"""The language-model head, and the matrix products that read it.

A bfloat16 model multiplies bfloat16 numbers, and adds the products up in float32:

    product of two bfloat16 numbers      exact in float32, so nothing is lost by not converting them first
    sum over the hidden size             float32, and so is the result: logits are not rounded to bfloat16
    sum_v e_v W_v, for the gradient      e = exp(z) is rounded to bfloat16; the largest e of a row is 1, which is exact

So log-probs are those of a float32 head, and only the gradient carries one rounding, as large as that of the hidden
state's own gradient. On CUDA this is one product with `out_dtype=torch.float32`. torch has no such product elsewhere:
there the same numbers are converted to float32 and multiplied, with the same result and the speed of float32.

All other models are multiplied in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """The frozen language-model head, which maps a hidden state to V logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]

    def product_dtype(self, hidden: Tensor) -> torch.dtype:
        """Return the type of the numbers that are multiplied: bfloat16 if head and hidden states have it."""
        is_low = self.weight.dtype == hidden.dtype == torch.bfloat16
        return torch.bfloat16 if is_low else torch.float32


@dataclass(frozen=True, slots=True)
class Directions:
    """Gradients with respect to R hidden states, times the temperature. They are filled in the forward pass."""

    expected: Tensor  # [R, H] sum_v p_v W_v
    entropy: Tensor | None  # [R, H] of the entropy of a row; `None` if no loss reads its gradient

    def between(self, start: int, end: int) -> Directions:
        """Return the part of the rows `start` to `end`, which shares memory with the whole."""
        return Directions(self.expected[start:end], None if self.entropy is None else self.entropy[start:end])

    def clear(self) -> None:
        self.expected.zero_()
        if self.entropy is not None:
            self.entropy.zero_()

    def add_tile(self, e: Tensor, ez: Tensor, weight: Tensor, shift: Tensor, shrink: Tensor) -> None:
        """Add a tile's part to the sums of e W_v and e z W_v, where z is relative to the largest logit and e = exp(z).

        Args:
            e, ez: [R, W] operands, and `weight` [W, H].
            shift: [R] largest logit before this tile minus the largest now; `shrink` is its exponential.
        """
        if self.entropy is not None:
            self.entropy.addcmul_(self.expected, shift[:, None]).mul_(shrink[:, None])
            add_product(self.entropy, ez, weight)
        self.expected.mul_(shrink[:, None])
        add_product(self.expected, e, weight)

    def finish(self, total: Tensor, mean: Tensor) -> None:
        """Turn the sums over the vocabulary into gradients. `total` [R] is the sum of e, `mean` [R] that of p z."""
        self.expected.div_(total[:, None])
        if self.entropy is not None:
            self.entropy.div_(total[:, None]).neg_().addcmul_(self.expected, mean[:, None])


def operand(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `numbers` to `dtype`, and return them in the type that `multiply` takes on their device."""
    rounded = numbers.to(dtype)
    return rounded if rounded.is_cuda else rounded.float()


def multiply(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply two matrices [M, K] and [K, N] of operands, or two batches of them, in float32.

    `out` [M, N] takes the result of two matrices.
    """
    function = torch.mm if left.dim() == 2 else torch.bmm
    types = {} if left.dtype == torch.float32 else {"out_dtype": torch.float32}
    product: Tensor = function(left, right, **types, out=out)
    return product


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices of operands to `total` [M, N], in place and in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += multiply(left, right)
