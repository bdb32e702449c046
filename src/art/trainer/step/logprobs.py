"""Log-probs and entropies of targets from hidden states, without a `[tokens, vocabulary]` tensor.

Only hidden states that predict a target go through the language-model head, each once. Logits, sums and results are
float32 (`head.products` says what is multiplied). The head is frozen, so the gradient with respect to a hidden state h
is known while the logits are at hand. With z = (W h + b) / temperature, p = softmax(z) and p z = sum_v p_v z_v:

    log p(t) = z_t - logsumexp(z)              d/dh = (W_t - sum_v p_v W_v) / temperature
    entropy  = logsumexp(z) - p z              d/dh = -(sum_v p_v (z_v - p z) W_v) / temperature

A head with a softcap c has z = c tanh((W h + b) / c) / temperature, and s_v W_v in place of W_v in all gradients, with
the slope s_v = 1 - tanh^2 of the logit v.

The forward pass keeps `sum_v p_v W_v`, one row of the hidden size per query, and the second sum only where a loss reads
the gradient of the entropy. The backward pass does not need the head.

Logits are computed in tiles, some queries by some of the vocabulary, and only one tile exists at a time. Sums over the
vocabulary are computed as in online softmax: relative to the largest logit so far, and rescaled when a larger one
appears. So a tile stays in the cache, and the head is read once per block of queries, not once per query.

A token that was drawn from a part of the vocabulary is normalised over that part (`masked_rows`). Where only one token
could be drawn, its log-prob is 0 with no gradient, and the head computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art.trainer.head import NEGLIGIBLE, Directions, RowMasks, TileMask, gathers, multiply, operand, sum_over_few
from art.trainer.head import Head as Head
from art.trainer.tree.tree import IntArray, Targets, VocabularyMask

_TILE = {"cpu": (512, 2**19), "cuda": (4096, 2**26)}
"""Maximum of queries and of logits in a tile, by device. On a CPU 2 MB of logits stay in the cache. Measured with
V = 32,768 and H = 768: 256 to 1,024 queries take the same time; 64 take 1.4 times as long, because the head is read
from memory more often. With V = 151,936 and H = 1,024, on one and two threads: tiles of 2**20 logits take as much CPU
time as 2**19; 2**21 take 5 % more, 2**22 10 % more. Fewer tiles gained no wall time."""

_FORGOTTEN = -200.0
"""Smallest change of the largest logit that is told apart from minus infinity: exp(-200) is 0 in float32."""

_PLAIN, _MANY, _FEW, _FORCED = range(4)
"""Kinds of targets: drawn from the whole vocabulary, from many tokens, from few, and from one alone."""


@dataclass(frozen=True, slots=True)
class TargetRows:
    """N targets (trained tokens), grouped by the row of logits that predicts them.

    There is one row per query (the token before a target), temperature and mask. A target whose mask holds a single
    token has no row, and does not count in N.
    """

    queries: Tensor  # [R] index into the layout
    temperatures: Tensor  # [R]
    order: Tensor  # [N] indices of the targets, sorted by row; the fields below are in this order
    rows: Tensor  # [N] row of each target, ascending
    token_ids: Tensor  # [N]
    starts: list[int]  # [R + 1] the targets of row r are starts[r] : starts[r + 1]
    masks: RowMasks | None = None
    """`None` if every row is normalised over the whole vocabulary."""
    num_forced: int = 0
    """Number of targets without a row."""

    def spread(self, values: Tensor) -> Tensor:
        """`values` [N] of the targets with a row, on the CPU and in the targets' own order; 0 for the others."""
        zeros = torch.zeros(len(self.rows) + self.num_forced, dtype=values.dtype)
        return zeros.index_copy(0, self.order.cpu(), values.cpu())


def group_by_row(targets: Targets, device: torch.device) -> TargetRows:
    """Group `targets` by the row of logits that predicts them, on `device`."""
    counts = np.bincount(targets.masks + 1, minlength=len(targets.mask_table) + 1)[1:].tolist()
    kinds_of_masks = [_kind(mask, count) for mask, count in zip(targets.mask_table, counts, strict=True)]
    kinds = np.asarray([*kinds_of_masks, _PLAIN])[targets.masks]
    has_row = np.flatnonzero(kinds != _FORCED)
    keys = np.stack([kinds, targets.masks, targets.queries, targets.temperatures]).astype(np.float64)[:, has_row]
    order = np.lexsort(keys[::-1])
    keys, order = keys[:, order], has_row[order]
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    first = np.flatnonzero(is_new)
    return TargetRows(
        queries=torch.from_numpy(targets.queries[order][first]).to(device),
        temperatures=torch.from_numpy(targets.temperatures[order][first]).to(device),
        order=torch.from_numpy(order).to(device),
        rows=torch.from_numpy(np.cumsum(is_new) - 1).to(device),
        token_ids=torch.from_numpy(targets.token_ids[order]).to(device),
        starts=[*first.tolist(), len(order)],
        masks=_row_masks(targets, order[first], kinds),
        num_forced=len(targets.masks) - len(order),
    )


def _kind(mask: VocabularyMask, num_targets: int) -> int:
    if mask.size == 1:
        return _FORCED
    return _FEW if gathers(mask, num_targets) else _MANY


def _row_masks(targets: Targets, of_rows: IntArray, kinds: IntArray) -> RowMasks | None:
    """The masks of rows. `of_rows` [R] are targets that read them, `kinds` [N] the kinds of all targets."""
    num_plain, num_many = ((kinds[of_rows] == kind).sum() for kind in (_PLAIN, _MANY))
    if num_plain == len(of_rows):
        return None
    return RowMasks(int(num_plain), int(num_plain + num_many), targets.masks[of_rows], targets.mask_table)


def target_logprobs(
    hidden: Tensor, head: Head, rows: TargetRows, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs [N] of the targets in the order of `rows`, and the entropy [R] of each row's distribution.

    `hidden` [T, H] are the final hidden states of a layout. The entropy carries a gradient only with
    `entropy_gradient`, which takes a third product with the head, and as much memory again as the log-probs' gradient.
    """
    hidden = hidden.index_select(0, rows.queries)
    if head.scale != 1:
        hidden = hidden * head.scale
    logprobs, entropy = _TargetLogprobs.apply(hidden, head, rows, entropy_gradient)
    return logprobs, entropy


class _TargetLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, rows: TargetRows, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        logprobs = hidden.new_empty(len(rows.rows), dtype=torch.float32)
        slopes = None if head.softcap is None else torch.empty_like(logprobs)
        # Without a gradient, half of the arithmetic is not needed.
        directions = _directions(hidden, entropy_gradient) if ctx.needs_input_grad[0] else None
        for start, end, is_few in _blocks(rows, _tile_size(hidden.device)[0]):
            inverse = rows.temperatures[start:end].reciprocal()  # [R]
            block = hidden[start:end]
            part = directions.between(start, end) if directions is not None else None
            if is_few:
                assert rows.masks is not None
                masks = rows.masks.between(start, end)
                log_normaliser, entropy[start:end] = sum_over_few(block, inverse, head, masks, part)
            else:
                mask = None if rows.masks is None else rows.masks.tiled(start, end, hidden.device)
                log_normaliser, entropy[start:end] = _sum_over_vocabulary(block, inverse, head, part, mask)
            of_block = slice(rows.starts[start], rows.starts[end])
            row, token_ids = rows.rows[of_block] - start, rows.token_ids[of_block]
            logits = torch.linalg.vecdot(block[row].float(), head.weight[token_ids].float())
            if head.bias is not None:
                logits += head.bias[token_ids]
            if slopes is not None:
                slopes[of_block] = head.cap(logits)
            # By rounding, the logit of a token with probability 1 may be slightly above the log-normaliser.
            logprobs[of_block] = (logits * inverse[row] - log_normaliser[row]).clamp_(max=0.0)
        if directions is not None:
            of_rows = rows.rows, rows.token_ids, rows.temperatures
            ctx.save_for_backward(directions.expected, directions.entropy, head.weight, slopes, *of_rows)
        ctx.dtype = hidden.dtype
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        expected, of_entropy, weight, slopes, rows, token_ids, temperatures = ctx.saved_tensors
        grad, entropy_grad = grads
        if grad is None:  # the loss reads nothing but the entropy
            grad_hidden = torch.zeros_like(expected)
        else:
            total = grad.new_zeros(len(expected)).index_add_(0, rows, grad)
            grad_hidden = expected * -total[:, None]
            of_targets = grad if slopes is None else grad * slopes
            grad_hidden.index_add_(0, rows, weight[token_ids].float() * of_targets[:, None])
        if entropy_grad is not None:
            grad_hidden.addcmul_(of_entropy, entropy_grad[:, None])
        return (grad_hidden / temperatures[:, None]).to(ctx.dtype), None, None, None


def _directions(hidden: Tensor, entropy_gradient: bool) -> Directions:
    expected = torch.empty_like(hidden, dtype=torch.float32)
    return Directions(expected, torch.empty_like(expected) if entropy_gradient else None)


def _tile_size(device: torch.device) -> tuple[int, int]:
    return _TILE.get(device.type, _TILE["cuda"])


def _blocks(rows: TargetRows, size: int) -> Iterator[tuple[int, int, bool]]:
    """Blocks of at most `size` rows: start, end, and whether they are normalised over few tokens each."""
    num_rows = len(rows.queries)
    borders = (num_rows,) * 2 if rows.masks is None else (rows.masks.num_plain, rows.masks.num_tiled)
    for first, last in zip((0, *borders), (*borders, num_rows), strict=True):
        for start in range(first, last, size):
            yield start, min(start + size, last), first == borders[1]


def _sum_over_vocabulary(
    hidden: Tensor, inverse: Tensor, head: Head, directions: Directions | None, mask: TileMask | None = None
) -> tuple[Tensor, Tensor]:
    """Log-normalisers [R] and entropies [R] of the softmax of (W `hidden` + bias) * `inverse`.

    `inverse` [R] is 1 / temperature. `directions` is overwritten. `mask` leaves tokens out of the vocabulary.
    """
    dtype = head.product_dtype(hidden)
    left = operand(hidden, dtype)
    width = max(1, _tile_size(hidden.device)[1] // len(left))
    width -= width % 64 if width > 64 else 0  # products of odd widths are slower
    largest = inverse.new_full((len(left),), torch.finfo(torch.float32).min)
    total, dot = torch.zeros_like(largest), torch.zeros_like(largest)  # sums of e and of e * z, e = exp(z)
    if directions is not None:
        directions.clear()
    buffers = inverse.new_empty(2, len(left) * min(width, len(head.weight)))
    for first in range(0, len(head.weight), width):
        weight = operand(head.weight[first : first + width], dtype)
        z, e = (buffer[: len(left) * len(weight)].view(len(left), -1) for buffer in buffers)
        multiply(left, weight.T, out=z)
        if head.bias is not None:
            z += head.bias[first : first + width].float()
        slope = head.cap(z)
        if mask is not None:
            mask.apply(z, first)
        before, largest = largest, torch.maximum(largest, z.amax(-1))
        shift = ((before - largest) * inverse).clamp_(min=_FORGOTTEN)
        shrink = shift.exp()
        dot.addcmul_(total, shift).mul_(shrink)
        total.mul_(shrink)
        z.sub_(largest[:, None]).mul_(inverse[:, None])
        if mask is not None:
            z.clamp_(min=NEGLIGIBLE)
        torch.exp(z, out=e)
        total += e.sum(-1)
        dot += z.mul_(e).sum(-1)
        if directions is not None:
            if slope is not None:
                e.mul_(slope)
                z.mul_(slope)
            directions.add_tile(operand(e, dtype), operand(z, dtype), weight, shift, shrink)
    mean, log_total = dot / total, total.log()
    if directions is not None:
        directions.finish(total, mean)
    return largest * inverse + log_total, log_total - mean
