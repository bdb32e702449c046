"""The language-model head, and the matrix products that read it.

A bfloat16 model multiplies bfloat16 numbers, and adds the products up in float32:

    product of two bfloat16 numbers      exact in float32, so nothing is lost by not converting them first
    sum over the hidden size             float32, and so is the result: logits are not rounded to bfloat16
    sum_v e_v W_v, for the gradient      e = exp(z) is rounded to bfloat16; the largest e of a row is 1, which is exact

So log-probs are those of a float32 head, and only the gradient carries one rounding, as large as that of the hidden
state's own gradient. On CUDA this is one product with `out_dtype=torch.float32`. torch has no such product elsewhere:
there the same numbers are converted to float32 and multiplied, with the same result and the speed of float32.

All other models are multiplied in float32.

Rows of logits that are normalised over a part of the vocabulary: over the tokens that could be drawn there.

    many tokens    all logits are computed in tiles as usual, and those of other tokens are pushed to `EXCLUDED`
    few tokens     only the logits of these tokens are computed, from rows of the head that are gathered first

`EXCLUDED` is finite. With minus infinity, a tile without any allowed token would turn its row into NaN, and so would
the product of probability and log-prob in the entropy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from art.trainer.tree.tree import VocabularyMask


@dataclass(frozen=True, slots=True)
class Head:
    """The frozen language-model head, which maps a hidden state to V logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    scale: float = 1.0
    """Factor of the hidden states (Granite, Cohere)."""
    softcap: float | None = None
    """Logits z become `softcap * tanh(z / softcap)` (Gemma)."""

    def cap(self, logits: Tensor) -> Tensor | None:
        """Apply the softcap to `logits` in place. Return the derivative, in the same shape; `None` without softcap."""
        if self.softcap is None:
            return None
        tanh = logits.div_(self.softcap).tanh_()
        slope = 1 - tanh.square()
        logits.mul_(self.softcap)
        return slope

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


EXCLUDED = -1e30
"""Added to the logits of tokens that could not be drawn."""
NEGLIGIBLE = -87.0
"""Logits are raised to this below the largest of their row. That changes no sum in float32, and exp(-87) still is a
normal number: on a CPU, exponentials that underflow take seven times as long, as for most excluded tokens."""
GATHER_COST = 24
"""Gathering a row of the head takes as long as multiplying it with this many hidden states."""
_BATCH_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Numbers of the head that are gathered at a time, by device."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of R rows: first rows without a mask, then those with many tokens, then those with few."""

    num_plain: int
    num_tiled: int
    """Number of rows that are computed in tiles: those without a mask and those with many tokens."""
    of_rows: NDArray[np.int64]  # [R] index into `table`, ascending in each of the three parts
    table: Sequence[VocabularyMask]

    def between(self, start: int, end: int) -> list[VocabularyMask]:
        return [self.table[index] for index in self.of_rows[start:end].tolist()]

    def tiled(self, start: int, end: int, device: torch.device) -> TileMask | None:
        """The mask of a block of rows with many tokens, `None` for rows without a mask."""
        if start < self.num_plain:
            return None
        distinct, of_rows = np.unique(self.of_rows[start:end], return_inverse=True)
        return TileMask([self.table[index] for index in distinct.tolist()], of_rows, device)


class TileMask:
    """The masks of a block of rows, expanded tile by tile. A whole row of expanded masks never exists."""

    def __init__(self, masks: Sequence[VocabularyMask], of_rows: NDArray[np.int64], device: torch.device) -> None:
        self._bits = torch.from_numpy(np.stack([mask.bits for mask in masks])).to(device)  # [M, bytes]
        self._of_rows = torch.from_numpy(of_rows).to(device)  # [R]
        values = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._expanded = torch.where(torch.from_numpy(values) == 1, 0.0, EXCLUDED).to(device)  # [256, 8]

    def apply(self, logits: Tensor, first: int) -> None:
        """Exclude tokens from a tile, in place: `logits` [R, W] are of the tokens from `first` on."""
        last = first + logits.shape[1]
        start = first // 8
        codes = self._bits[:, start : -(-last // 8)].int()
        penalties = embedding(codes, self._expanded).flatten(1)[:, first - 8 * start : last - 8 * start]  # [M, W]
        logits += penalties if len(penalties) == 1 else penalties.index_select(0, self._of_rows)


def gathers(mask: VocabularyMask, num_rows: int) -> bool:
    """Whether gathering the mask's rows of the head for `num_rows` rows of logits is faster than computing tiles."""
    return mask.is_few and mask.size * (GATHER_COST + num_rows) <= mask.vocab_size * num_rows


def sum_over_few(
    hidden: Tensor, inverse: Tensor, head: Head, masks: Sequence[VocabularyMask], directions: Directions | None
) -> tuple[Tensor, Tensor]:
    """Log-normalisers [R] and entropies [R] of rows whose masks list few tokens.

    The other arguments are those of `logprobs._sum_over_vocabulary`. Rows of equal masks are computed together, and
    masks of about the same size and number of rows in one batch.
    """
    dtype = head.product_dtype(hidden)
    normalisers, entropies = torch.empty_like(inverse), torch.empty_like(inverse)
    most = _BATCH_ELEMENTS.get(hidden.device.type, _BATCH_ELEMENTS["cuda"])
    for batch in _batches(masks, max_padded=max(1, most // hidden.shape[1])):
        rows, token_ids, place = (torch.from_numpy(one).to(hidden.device) for one in batch.arrays())
        weight = operand(embedding(token_ids, head.weight), dtype)  # [G, K, H]
        z = multiply(operand(hidden[rows], dtype), weight.transpose(1, 2))  # [G, L, K]
        if head.bias is not None:
            z += head.bias[token_ids].float()[:, None, :]
        slope = head.cap(z)
        z.mul_(inverse[rows][:, :, None])
        z.masked_fill_(torch.from_numpy(batch.is_padding()).to(z.device)[:, None, :], EXCLUDED)
        largest = z.amax(-1, keepdim=True)
        e = z.sub_(largest).clamp_(min=NEGLIGIBLE).exp()
        total = e.sum(-1)
        log_total = total.log()
        ez = z.mul_(e)
        mean = ez.sum(-1) / total
        real = rows.flatten()[place]
        normalisers[real] = (largest[:, :, 0] + log_total).flatten()[place]
        entropies[real] = (log_total - mean).flatten()[place]
        if directions is not None:
            if slope is not None:
                e, ez = e * slope, ez * slope
            expected = multiply(operand(e, dtype), weight) / total[:, :, None]  # [G, L, H]
            directions.expected[real] = expected.flatten(0, 1)[place]
            if directions.entropy is not None:
                weighted = multiply(operand(ez, dtype), weight) / total[:, :, None]
                directions.entropy[real] = (mean[:, :, None] * expected - weighted).flatten(0, 1)[place]
    return normalisers, entropies


@dataclass(frozen=True, slots=True)
class _Batch:
    """G masks with their rows, padded to the largest."""

    masks: list[VocabularyMask]
    starts: list[int]
    """First row of each mask. Its rows follow one another."""
    counts: list[int]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
        """Rows [G, L], token ids [G, K], and which of the flattened G * L entries are rows, not padding."""
        starts, counts = np.asarray(self.starts)[:, None], np.asarray(self.counts)[:, None]
        lanes = np.arange(counts.max())[None]
        token_ids = np.zeros((len(self.masks), max(mask.size for mask in self.masks)), dtype=np.int32)
        for line, mask in zip(token_ids, self.masks, strict=True):
            line[: mask.size] = mask.ids
        return starts + np.minimum(lanes, counts - 1), token_ids, np.flatnonzero(lanes < counts)

    def is_padding(self) -> NDArray[np.bool_]:  # [G, K]
        sizes = np.asarray([mask.size for mask in self.masks])[:, None]
        padding: NDArray[np.bool_] = np.arange(sizes.max())[None] >= sizes
        return padding


def _batches(masks: Sequence[VocabularyMask], *, max_padded: int) -> Iterator[_Batch]:
    """Cut rows into batches. `masks` has one entry per row, and equal entries are neighbours."""
    groups: dict[tuple[int, int], list[tuple[VocabularyMask, int, int]]] = {}
    start = 0
    for mask, rows in itertools.groupby(masks):
        count = len(list(rows))
        groups.setdefault((mask.size.bit_length(), count.bit_length()), []).append((mask, start, count))
        start += count
    for (size_bits, count_bits), group in sorted(groups.items()):
        at_once = max(1, max_padded >> max(size_bits, count_bits))
        for first in range(0, len(group), at_once):
            yield _Batch(*map(list, zip(*group[first : first + at_once], strict=True)))
