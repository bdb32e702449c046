"""Log-probs and entropies of targets from hidden states, without a `[tokens, vocabulary]` tensor.

Only hidden states that predict a target go through the language-model head, each once. Logits, sums and results are
float32. The head is frozen, so the gradient with respect to a hidden state h
is known while the logits are at hand. With z = (W h + b) / temperature, p = softmax(z) and p z = sum_v p_v z_v:

    log p(t) = z_t - logsumexp(z)              d/dh = (W_t - sum_v p_v W_v) / temperature
    entropy  = logsumexp(z) - p z              d/dh = -(sum_v p_v (z_v - p z) W_v) / temperature

A head with a softcap c has z = c tanh((W h + b) / c) / temperature, and s_v W_v in place of W_v in all gradients, with
the slope s_v = 1 - tanh^2 of the logit v.

The forward pass keeps `sum_v p_v W_v`, one row of the hidden size per query, and the second sum only where a loss reads
the gradient of the entropy. The backward pass does not need the head.

Logits are computed in tiles, some queries by some of the vocabulary, as in online softmax. Only one tile exists at a
time, so it stays in the cache, and the head is read once per block of queries, not once per query.

A token that was drawn from a part of the vocabulary is normalised over that part (`RowMasks`). Where only one token
could be drawn, its log-prob is 0 with no gradient, and the head computes nothing. The other rows of logits with a mask
are computed as usual, and the logits of tokens that could not be drawn are pushed to `_EXCLUDED`. That is finite: with
minus infinity, a tile without any allowed token would turn its row into NaN, and so would the product of probability
and log-prob in the entropy.

A bfloat16 model multiplies bfloat16 numbers, and adds the products up in float32:

    product of two bfloat16 numbers      exact in float32, so nothing is lost by not converting them first
    sum over the hidden size             float32, and so is the result: logits are not rounded to bfloat16
    sum_v e_v W_v, for the gradient      e = exp(z) is rounded to bfloat16; the largest e of a row is 1, which is exact

So log-probs are those of a float32 head, and only the gradient carries one rounding, as large as that of the hidden
state's own gradient. On CUDA this is one product with `out_dtype=torch.float32`; elsewhere the same numbers are
converted to float32 and multiplied. All other models are multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from art.trainer.tree import Targets, VocabularyMask

_TILE = {"cpu": (512, 2**19), "cuda": (4096, 2**26)}
"""Maximum of queries and of logits in a tile, by device. On a CPU 2 MB of logits stay in the cache. 64 queries take 1.4
times as long, because the head is read from memory more often; tiles of 2**22 logits take 10 % longer."""

_FORGOTTEN = -200.0
"""Smallest change of the largest logit that is told apart from minus infinity: exp(-200) is 0 in float32."""
_EXCLUDED = -1e30
"""Added to the logits of tokens that could not be drawn."""
_NEGLIGIBLE = -87.0
"""Logits are raised to this below the largest of their row. That changes no sum in float32, and exp(-87) still is a
normal number: on a CPU, exponentials that underflow take seven times as long, as for most excluded tokens."""


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


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of R rows: first rows without a mask, then those with one."""

    num_plain: int
    of_rows: NDArray[np.int64]  # [R] index into `table`, ascending
    table: Sequence[VocabularyMask]

    def between(self, start: int, end: int, device: torch.device) -> _TileMask | None:
        """The mask of a block of rows, `None` for rows without a mask."""
        if start < self.num_plain:
            return None
        distinct, of_rows = np.unique(self.of_rows[start:end], return_inverse=True)
        return _TileMask([self.table[index] for index in distinct.tolist()], of_rows, device)


class _TileMask:
    """The masks of a block of rows, expanded tile by tile. A whole row of expanded masks never exists."""

    def __init__(self, masks: Sequence[VocabularyMask], of_rows: NDArray[np.int64], device: torch.device) -> None:
        self._bits = torch.from_numpy(np.stack([mask.bits for mask in masks])).to(device)  # [M, bytes]
        self._of_rows = torch.from_numpy(of_rows).to(device)  # [R]
        values = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._expanded = torch.where(torch.from_numpy(values) == 1, 0.0, _EXCLUDED).to(device)  # [256, 8]

    def apply(self, logits: Tensor, first: int) -> None:
        """Exclude tokens from a tile, in place: `logits` [R, W] are of the tokens from `first` on."""
        last = first + logits.shape[1]
        start = first // 8
        codes = self._bits[:, start : -(-last // 8)].int()
        penalties = embedding(codes, self._expanded).flatten(1)[:, first - 8 * start : last - 8 * start]  # [M, W]
        logits += penalties if len(penalties) == 1 else penalties.index_select(0, self._of_rows)


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
    is_forced = np.asarray([*(mask.size == 1 for mask in targets.mask_table), False])[targets.masks]
    has_row = np.flatnonzero(~is_forced)
    keys = np.stack([targets.masks, targets.queries, targets.temperatures]).astype(np.float64)[:, has_row]
    order = np.lexsort(keys[::-1])
    keys, order = keys[:, order], has_row[order]
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    first = np.flatnonzero(is_new)
    masks = targets.masks[order[first]]
    num_plain = int((masks < 0).sum())
    return TargetRows(
        queries=torch.from_numpy(targets.queries[order][first]).to(device),
        temperatures=torch.from_numpy(targets.temperatures[order][first]).to(device),
        order=torch.from_numpy(order).to(device),
        rows=torch.from_numpy(np.cumsum(is_new) - 1).to(device),
        token_ids=torch.from_numpy(targets.token_ids[order]).to(device),
        starts=[*first.tolist(), len(order)],
        masks=None if num_plain == len(masks) else RowMasks(num_plain, masks, targets.mask_table),
        num_forced=len(targets.masks) - len(order),
    )


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
        directions = None
        if ctx.needs_input_grad[0]:
            expected = torch.zeros_like(hidden, dtype=torch.float32)
            directions = _Directions(expected, torch.zeros_like(expected) if entropy_gradient else None)
        # Blocks of rows, all with or all without masks. The temperature divides the logits of a row.
        size, _ = _TILE.get(hidden.device.type, _TILE["cuda"])
        border = len(hidden) if rows.masks is None else rows.masks.num_plain
        starts = [*range(0, border, size), *range(border, len(hidden), size)]
        for start in starts:
            end = min(start + size, border if start < border else len(hidden))
            inverse = rows.temperatures[start:end].reciprocal()  # [R]
            block = hidden[start:end]
            part = directions.between(start, end) if directions is not None else None
            mask = None if rows.masks is None else rows.masks.between(start, end, hidden.device)
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


@dataclass(frozen=True, slots=True)
class _Directions:
    """Gradients with respect to R hidden states, times the temperature. They are filled in the forward pass."""

    expected: Tensor  # [R, H] sum_v p_v W_v
    entropy: Tensor | None  # [R, H] of the entropy of a row; `None` if no loss reads its gradient

    def between(self, start: int, end: int) -> _Directions:
        """Return the part of the rows `start` to `end`, which shares memory with the whole."""
        return _Directions(self.expected[start:end], None if self.entropy is None else self.entropy[start:end])

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


def _sum_over_vocabulary(
    hidden: Tensor, inverse: Tensor, head: Head, directions: _Directions | None, mask: _TileMask | None = None
) -> tuple[Tensor, Tensor]:
    """Log-normalisers [R] and entropies [R] of the softmax of (W `hidden` + bias) * `inverse`.

    `inverse` [R] is 1 / temperature. The zeros in `directions` are overwritten. `mask` leaves tokens out.
    """
    dtype = torch.bfloat16 if head.weight.dtype == hidden.dtype == torch.bfloat16 else torch.float32
    left = operand(hidden, dtype)
    width = max(1, _TILE.get(hidden.device.type, _TILE["cuda"])[1] // len(left))
    width -= width % 64 if width > 64 else 0  # products of odd widths are slower
    largest = inverse.new_full((len(left),), torch.finfo(torch.float32).min)
    total, dot = torch.zeros_like(largest), torch.zeros_like(largest)  # sums of e and of e * z, e = exp(z)
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
        # Online softmax: z is relative to the largest logit so far. Where this tile has a larger one, all earlier z
        # change by `shift`, so their e shrink by exp(shift), and the sum of e * z becomes that of e * (z + shift).
        before, largest = largest, torch.maximum(largest, z.amax(-1))
        shift = ((before - largest) * inverse).clamp_(min=_FORGOTTEN)
        shrink = shift.exp()
        dot.addcmul_(total, shift).mul_(shrink)
        total.mul_(shrink)
        z.sub_(largest[:, None]).mul_(inverse[:, None])
        if mask is not None:
            z.clamp_(min=_NEGLIGIBLE)
        torch.exp(z, out=e)
        total += e.sum(-1)
        dot += z.mul_(e).sum(-1)
        if directions is not None:
            if slope is not None:  # the softcap's derivative takes part in gradients, and not in the sums above
                e.mul_(slope)
                z.mul_(slope)
            directions.add_tile(operand(e, dtype), operand(z, dtype), weight, shift, shrink)
    mean, log_total = dot / total, total.log()
    if directions is not None:
        directions.finish(total, mean)
    return largest * inverse + log_total, log_total - mean


def operand(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `numbers` to `dtype`, and return them in the type that `multiply` takes on their device."""
    rounded = numbers.to(dtype)
    return rounded if rounded.is_cuda else rounded.float()


def multiply(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply two matrices [M, K] and [K, N] of operands in float32, into `out` [M, N] if it is given."""
    types = {} if left.dtype == torch.float32 else {"out_dtype": torch.float32}
    product: Tensor = torch.mm(left, right, **types, out=out)
    return product


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices of operands to `total` [M, N], in place and in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += multiply(left, right)
