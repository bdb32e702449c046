"""Rows of logits that are normalised over a part of the vocabulary: over the tokens that could be drawn there.

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

from art.trainer.head.products import Directions, Head, multiply, operand
from art.trainer.tree.masks import VocabularyMask

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
