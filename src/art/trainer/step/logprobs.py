"""Log-probs of targets from hidden states, without a `[tokens, vocabulary]` tensor.

Only hidden states that predict a target go through the language-model head, each once and in float32. The head is
frozen, so the gradient of a log-prob with respect to its hidden state h is known while the logits are at hand:

    log p(t | h) = z_t - logsumexp(z)     where z = W h / temperature
    d/dh         = (W_t - sum_v p_v W_v) / temperature

The forward pass keeps `sum_v p_v W_v`, one row of the hidden size per query. The backward pass does not need the head.

Logits are computed in tiles, some queries by some of the vocabulary, and only one tile exists at a time. Sums over the
vocabulary are computed as in online softmax: relative to the largest logit so far, and rescaled when a larger one
appears. So a tile stays in the cache, and the head is read once per block of queries, not once per query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art.trainer.tree.tree import Targets

_TILE = {"cpu": (512, 2**19), "cuda": (4096, 2**26)}
"""Maximum of queries and of logits in a tile, by device. On a CPU 2 MB of logits stay in the cache. Measured with
V = 32,768 and H = 768: 256 to 1,024 queries take the same time; 64 take 1.4 times as long, because the head is read
from memory more often. With V = 151,936 and H = 1,024, on one and two threads: tiles of 2**20 logits take as much CPU
time as 2**19; 2**21 take 5 % more, 2**22 10 % more. Fewer tiles gained no wall time."""


@dataclass(frozen=True, slots=True)
class Head:
    """The frozen language-model head, which maps a hidden state to V logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]


@dataclass(frozen=True, slots=True)
class TargetRows:
    """N targets (trained tokens), grouped by the row of logits that predicts them.

    There is one row per query (the token before a target) and temperature.
    """

    queries: Tensor  # [R] index into the layout
    temperatures: Tensor  # [R]
    order: Tensor  # [N] indices of the targets, sorted by row; the fields below are in this order
    rows: Tensor  # [N] row of each target, ascending
    token_ids: Tensor  # [N]
    starts: list[int]  # [R + 1] the targets of row r are starts[r] : starts[r + 1]


def group_by_row(targets: Targets, device: torch.device) -> TargetRows:
    """Group `targets` by the row of logits that predicts them, on `device`."""
    keys = np.stack([targets.queries.astype(np.float64), targets.temperatures.astype(np.float64)])
    order = np.lexsort((keys[1], keys[0]))
    keys = keys[:, order]
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
    )


def target_logprobs(hidden: Tensor, head: Head, rows: TargetRows) -> tuple[Tensor, Tensor]:
    """Compute the log-probs [N] of the targets in the order of `rows`, and the entropy [R] of each row's distribution.

    `hidden` [T, H] are the final hidden states of a layout. The entropy carries no gradient.
    """
    logprobs, entropy = _TargetLogprobs.apply(hidden.index_select(0, rows.queries), head, rows)
    return logprobs, entropy


class _TargetLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, rows: TargetRows) -> tuple[Tensor, Tensor]:
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        logprobs = hidden.new_empty(len(rows.rows), dtype=torch.float32)
        # Without a gradient, half of the arithmetic is not needed.
        expected = torch.empty_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        size, tile_elements = _TILE.get(hidden.device.type, _TILE["cuda"])
        for start in range(0, len(hidden), size):
            end = min(start + size, len(hidden))
            inverse = rows.temperatures[start:end].reciprocal()  # [R]
            scaled = hidden[start:end].float() * inverse[:, None]
            log_normaliser, entropy[start:end] = _sum_over_vocabulary(
                scaled, inverse, head, tile_elements, expected[start:end] if expected is not None else None
            )
            of_block = slice(rows.starts[start], rows.starts[end])
            row, token_ids = rows.rows[of_block] - start, rows.token_ids[of_block]
            logits = torch.linalg.vecdot(scaled[row], head.weight[token_ids].float())
            if head.bias is not None:
                logits += head.bias[token_ids] * inverse[row]
            # By rounding, the logit of a token with probability 1 may be slightly above the log-normaliser.
            logprobs[of_block] = (logits - log_normaliser[row]).clamp_(max=0.0)
        if expected is not None:
            ctx.save_for_backward(expected, head.weight, rows.rows, rows.token_ids, rows.temperatures)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        expected, weight, rows, token_ids, temperatures = ctx.saved_tensors
        grad = grads[0]
        total = grad.new_zeros(len(expected)).index_add_(0, rows, grad)
        grad_hidden = expected * -total[:, None]
        grad_hidden.index_add_(0, rows, weight[token_ids].float() * grad[:, None])
        return (grad_hidden / temperatures[:, None]).to(ctx.dtype), None, None


def _sum_over_vocabulary(
    scaled: Tensor, inverse: Tensor, head: Head, tile_elements: int, expected: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-normalisers [R] and entropies [R] of the softmax of W `scaled` + bias * `inverse`.

    `scaled` [R, H] are hidden states divided by their temperatures, `inverse` [R] is 1 / temperature. If `expected`
    [R, H] is not `None`, it is overwritten with `sum_v p_v W_v`.
    """
    width = max(1, tile_elements // len(scaled))
    width -= width % 64 if width > 64 else 0  # products of odd widths are slower
    largest = scaled.new_full((len(scaled),), torch.finfo(torch.float32).min)
    total, dot = torch.zeros_like(largest), torch.zeros_like(largest)  # sums of e and of e * z, e = exp(z)
    buffers = scaled.new_empty(2, len(scaled) * min(width, len(head.weight)))
    if expected is not None:
        expected.zero_()
    for first in range(0, len(head.weight), width):
        weight = head.weight[first : first + width].float()
        z, e = (buffer[: len(scaled) * len(weight)].view(len(scaled), -1) for buffer in buffers)
        torch.mm(scaled, weight.T, out=z)
        if head.bias is not None:
            z.addr_(inverse, head.bias[first : first + width].float())
        before, largest = largest, torch.maximum(largest, z.amax(-1))
        shift = before - largest
        shrink = shift.exp()
        dot.addcmul_(total, shift).mul_(shrink)
        total.mul_(shrink)
        torch.exp(z.sub_(largest[:, None]), out=e)
        total += e.sum(-1)
        dot += z.mul_(e).sum(-1)
        if expected is not None:
            expected.mul_(shrink[:, None]).addmm_(e, weight)
    if expected is not None:
        expected.div_(total[:, None])
    log_total = total.log()
    return largest + log_total, log_total - dot / total
