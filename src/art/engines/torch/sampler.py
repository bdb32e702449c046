"""Sample tokens from logits: the whole batch at once, each row with its own settings.

Rows are sampled by inverse transform: the token is the first whose cumulative probability exceeds the row's uniform
number. Softmax, cumulative sum and search are much faster than one exponential draw per vocabulary entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MIN_TEMPERATURE = 1e-6
"""Lower temperatures are raised to this. Scaled logits would overflow, and the best token has probability 1 anyway."""
_BLOCK = 1024
_NUCLEUS = 1024
"""How many of the best tokens are searched first for the nucleus (`top_p`)."""


@dataclass(slots=True)
class Sampled:
    """Tokens drawn for the B rows of a batch, with their log-probs."""

    token_ids: list[int]  # [B]
    logprobs: list[float]  # [B] NaN where the logits were not finite
    top_logprobs: list[list[tuple[int, float]]] | None  # [B][num_top_logprobs], None if no row asked


def sample(
    logits: Tensor,
    uniforms: npt.NDArray[np.float64],
    temperatures: list[float],
    top_ps: list[float],
    num_top_logprobs: list[int],
) -> Sampled:
    """Sample one token per row of `logits` [B, V], with its log-prob under the distribution that it was drawn from.

    Each row has its own random number in [0, 1), in `uniforms`, and its own settings. Temperature 0 is greedy.
    """
    logits = logits.float()
    greedy = [t == 0.0 for t in temperatures]
    if any(t not in (0.0, 1.0) for t in temperatures):
        scale = [1.0 / max(t, _MIN_TEMPERATURE) if t else 1.0 for t in temperatures]
        logits = logits * torch.tensor(scale, dtype=torch.float32, device=logits.device)[:, None]
    probs = torch.softmax(logits, dim=-1)
    top_ps = [1.0 if g else p for p, g in zip(top_ps, greedy, strict=True)]
    if min(top_ps) < 1.0:
        probs = _keep_nucleus(probs, top_ps)
    tokens = logits.argmax(dim=-1) if all(greedy) else _inverse_transform(probs, uniforms)
    if any(greedy) and not all(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(dim=-1), tokens)
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
    top = _top_logprobs(probs, num_top_logprobs) if any(num_top_logprobs) else None
    return Sampled(tokens.tolist(), logprobs.tolist(), top)


def _inverse_transform(probs: Tensor, uniforms: npt.NDArray[np.float64]) -> Tensor:
    """The first token of each row whose cumulative probability exceeds the row's uniform number: [B].

    In a large vocabulary the block is searched first, then the token in it. Other blocks are only summed.
    """
    vocab_size = probs.shape[1]
    blocked = vocab_size > 4 * _BLOCK
    weights = _block_sums(probs) if blocked else probs
    cumulative = _cumulative(weights)
    draws = torch.from_numpy(uniforms).to(cumulative.dtype).to(cumulative.device)[:, None] * cumulative[:, -1:]
    index = _first_above(cumulative, draws)
    if blocked:
        draws = draws - (cumulative - weights).gather(1, index)
        columns = index * _BLOCK + torch.arange(_BLOCK, device=probs.device)
        block = probs.gather(1, columns.clamp(max=vocab_size - 1)).masked_fill_(columns >= vocab_size, 0.0)
        index = index * _BLOCK + _first_above(_cumulative(block), draws)
    return index[:, 0].clamp_(max=vocab_size - 1)  # only a row of NaN gets a larger index, and its log-prob is NaN


def _block_sums(probs: Tensor) -> Tensor:
    """Sums over consecutive blocks of `_BLOCK` columns: [B, blocks]. The last block may be shorter."""
    whole = probs.shape[1] // _BLOCK * _BLOCK
    sums = probs[:, :whole].view(len(probs), -1, _BLOCK).sum(dim=-1)
    return torch.cat((sums, probs[:, whole:].sum(dim=-1, keepdim=True)), dim=1)


def _cumulative(weights: Tensor) -> Tensor:
    # Double precision keeps the tail of a large vocabulary exact. MPS does not have it.
    return torch.cumsum(weights, dim=-1, dtype=torch.float32 if weights.device.type == "mps" else torch.float64)


def _first_above(cumulative: Tensor, draws: Tensor) -> Tensor:
    """Index of the first column of `cumulative` [B, K] that exceeds `draws` [B, 1]. Its weight is never 0."""
    # A draw that rounds up to the total would be searched past the last possible column.
    below_total = cumulative[:, -1:] * (1.0 - torch.finfo(cumulative.dtype).eps)
    draws = torch.minimum(draws.clamp(min=0.0), below_total)
    return torch.searchsorted(cumulative, draws, right=True).clamp_(max=cumulative.shape[1] - 1)


def _keep_nucleus(probs: Tensor, top_ps: list[float]) -> Tensor:
    """Keep the smallest set of tokens with mass `top_p` in each row where it is below 1, renormalised: [B, V]."""
    rows = torch.tensor([i for i, p in enumerate(top_ps) if p < 1.0], device=probs.device)
    limits = torch.tensor([p for p in top_ps if p < 1.0], dtype=probs.dtype, device=probs.device)[:, None]
    limits.clamp_(min=torch.finfo(probs.dtype).tiny)  # keep the best token even if `top_p` rounds to 0 in this dtype
    chosen = probs[rows]
    ordered, order = chosen.topk(min(_NUCLEUS, chosen.shape[1]), dim=-1)
    if bool((ordered.sum(dim=-1, keepdim=True) < limits).any()):  # rare: sorting a large vocabulary is slow
        ordered, order = chosen.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= limits, 0.0)
    kept = torch.zeros_like(chosen).scatter_(1, order, ordered)
    return probs.index_copy(0, rows, kept / kept.sum(dim=-1, keepdim=True))


def _top_logprobs(probs: Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """The most likely tokens of each row, best first, without tokens of probability 0."""
    values, indices = probs.topk(max(counts), dim=-1)
    rows = zip(indices.tolist(), values.log().tolist(), counts, strict=True)
    return [[(t, lp) for t, lp in zip(ids[:n], lps[:n], strict=True) if lp > float("-inf")] for ids, lps, n in rows]


def token_logprobs(logits: Tensor, targets: Tensor) -> list[float]:
    """Return the log-probs [B] of the tokens `targets` [B] under `logits` [B, V] at temperature 1."""
    logits = logits.float()
    logprobs: list[float] = (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=-1)).tolist()
    return logprobs
