"""Log-probs of targets from hidden states, without a `[tokens, vocabulary]` tensor.

Only hidden states that predict a target go through the language-model head, each once, in chunks and in float32. The
head is frozen, so the gradient of a log-prob with respect to its hidden state h is known while the chunk is at hand:

    log p(t | h) = z_t - logsumexp(z)     with z = W h / temperature
    d/dh         = (W_t - sum_v p_v W_v) / temperature

The forward pass keeps `sum_v p_v W_v`, one row of the hidden size per query; the backward pass needs no head at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art.trainer.tree import Targets

_CHUNK_ELEMENTS = 2**19
"""Logits computed at once: 2 MB, which stays in a processor's cache. At least 64 rows are taken at once."""

_CHUNK_ELEMENTS_GPU = 2**26


@dataclass(frozen=True, slots=True)
class Head:
    """The frozen language-model head."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Targets grouped by the logits row that they read: one row per (query, temperature)."""

    queries: Tensor  # [R] index into the layout
    temperatures: Tensor  # [R]
    order: Tensor  # [N] the targets sorted by row; what follows is in this order
    rows: Tensor  # [N] ascending
    token_ids: Tensor  # [N]
    starts: list[int]  # [R + 1] row r has the targets starts[r] : starts[r + 1]


def group_by_row(targets: Targets, device: torch.device) -> TargetRows:
    """The rows of `targets`, on `device`."""
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
    """Log-probs [N] of the targets in the order of `rows`, and the entropy [R] of each row's distribution.

    `hidden` [T, H] are the final hidden states of a layout. The entropy carries no gradient.
    """
    logprobs, entropy = _TargetLogprobs.apply(hidden.index_select(0, rows.queries), head, rows)
    return logprobs, entropy


class _TargetLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, rows: TargetRows) -> tuple[Tensor, Tensor]:
        count, hidden_size = hidden.shape
        weight = head.weight.float()
        expected = hidden.new_empty(count, hidden_size, dtype=torch.float32)  # sum_v p_v W_v
        entropy = hidden.new_empty(count, dtype=torch.float32)
        logprobs = hidden.new_empty(len(rows.rows), dtype=torch.float32)
        budget = _CHUNK_ELEMENTS if hidden.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
        chunk = max(64, budget // len(weight))
        for start in range(0, count, chunk):
            end = min(start + chunk, count)
            logits = hidden[start:end].float() @ weight.T
            if head.bias is not None:
                logits += head.bias
            logits /= rows.temperatures[start:end, None]
            log_normaliser = logits.logsumexp(-1)
            of_chunk = slice(rows.starts[start], rows.starts[end])
            row = rows.rows[of_chunk] - start
            logprobs[of_chunk] = logits[row, rows.token_ids[of_chunk]] - log_normaliser[row]
            logits -= log_normaliser[:, None]
            p = logits.exp()
            entropy[start:end] = -torch.linalg.vecdot(p, logits)
            torch.mm(p, weight, out=expected[start:end])
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
