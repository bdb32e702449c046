"""From logits to tokens: the whole batch at once, each row with its own settings.

A row is sampled by inverse transform: the token is where the cumulative distribution passes the row's uniform number.
Softmax, cumulative sum and search are much cheaper than one exponential draw per vocabulary entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MIN_TEMPERATURE = 1e-6
"""Below it scaled logits would overflow, and the best token has all of the probability anyway."""
_BLOCK = 1024
_NUCLEUS = 1024
"""Tokens that a nucleus is looked for in first."""


@dataclass(slots=True)
class SamplingParams:
    """Settings of the B rows to sample."""

    uniforms: npt.NDArray[np.float64]  # [B] in [0, 1)
    temperatures: list[float]  # [B] 0 is greedy
    top_ps: list[float]  # [B]
    num_top_logprobs: list[int]  # [B]


@dataclass(slots=True)
class Sampled:
    token_ids: list[int]  # [B]
    logprobs: list[float]  # [B] NaN where the logits were not finite
    top_logprobs: list[list[tuple[int, float]]] | None  # [B][num_top_logprobs], None if no row asked


def sample(logits: Tensor, params: SamplingParams) -> Sampled:
    """One token per row of `logits` [B, V], with its log-prob under the distribution that it was drawn from."""
    logits = logits.float()
    greedy = [t == 0.0 for t in params.temperatures]
    if any(t not in (0.0, 1.0) for t in params.temperatures):
        scale = [1.0 / max(t, _MIN_TEMPERATURE) if t else 1.0 for t in params.temperatures]
        logits = logits * torch.tensor(scale, dtype=torch.float32, device=logits.device)[:, None]
    probs = torch.softmax(logits, dim=-1)
    top_ps = [1.0 if g else p for p, g in zip(params.top_ps, greedy, strict=True)]
    if min(top_ps) < 1.0:
        probs = _keep_nucleus(probs, top_ps)
    tokens = logits.argmax(dim=-1) if all(greedy) else _inverse_transform(probs, params.uniforms)
    if any(greedy) and not all(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(dim=-1), tokens)
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
    top = _top_logprobs(probs, params.num_top_logprobs) if any(params.num_top_logprobs) else None
    return Sampled(tokens.tolist(), logprobs.tolist(), top)


def _inverse_transform(probs: Tensor, uniforms: npt.NDArray[np.float64]) -> Tensor:
    """The first token of each row whose cumulative probability exceeds the row's uniform number: [B].

    A large vocabulary is searched by blocks and then within one block: most of it is summed only.
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
    return index[:, 0].clamp_(max=vocab_size - 1)  # only a row of NaN can be above; its log-prob says so


def _block_sums(probs: Tensor) -> Tensor:
    """Sums over consecutive blocks of `_BLOCK` columns, the last one shorter: [B, blocks]"""
    whole = probs.shape[1] // _BLOCK * _BLOCK
    sums = probs[:, :whole].view(len(probs), -1, _BLOCK).sum(dim=-1)
    return torch.cat((sums, probs[:, whole:].sum(dim=-1, keepdim=True)), dim=1)


def _cumulative(weights: Tensor) -> Tensor:
    # Double precision keeps the tail of a large vocabulary exact; MPS has none.
    return torch.cumsum(weights, dim=-1, dtype=torch.float32 if weights.device.type == "mps" else torch.float64)


def _first_above(cumulative: Tensor, draws: Tensor) -> Tensor:
    """Index of the first column of `cumulative` [B, K] above `draws` [B, 1]; never one of weight 0."""
    # Rounding must not push a draw onto the total: the search would run past the last possible column.
    below_total = cumulative[:, -1:] * (1.0 - torch.finfo(cumulative.dtype).eps)
    draws = torch.minimum(draws.clamp(min=0.0), below_total)
    return torch.searchsorted(cumulative, draws, right=True).clamp_(max=cumulative.shape[1] - 1)


def _keep_nucleus(probs: Tensor, top_ps: list[float]) -> Tensor:
    """Rows with `top_p` below 1 lose all outside their smallest set of that mass, and are renormalised: [B, V]."""
    rows = torch.tensor([i for i, p in enumerate(top_ps) if p < 1.0], device=probs.device)
    limits = torch.tensor([p for p in top_ps if p < 1.0], dtype=probs.dtype, device=probs.device)[:, None]
    limits.clamp_(min=torch.finfo(probs.dtype).tiny)  # the best token stays, also where `top_p` is 0 in this dtype
    chosen = probs[rows]
    ordered, order = chosen.topk(min(_NUCLEUS, chosen.shape[1]), dim=-1)
    if bool((ordered.sum(dim=-1, keepdim=True) < limits).any()):  # rare: sorting a large vocabulary is slow
        ordered, order = chosen.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= limits, 0.0)
    kept = torch.zeros_like(chosen).scatter_(1, order, ordered)
    return probs.index_copy(0, rows, kept / kept.sum(dim=-1, keepdim=True))


def _top_logprobs(probs: Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """The best tokens of each row, best first; tokens that could not be drawn are left out."""
    values, indices = probs.topk(max(counts), dim=-1)
    rows = zip(indices.tolist(), values.log().tolist(), counts, strict=True)
    return [[(t, lp) for t, lp in zip(ids[:n], lps[:n], strict=True) if lp > float("-inf")] for ids, lps, n in rows]


def token_logprobs(logits: Tensor, targets: Tensor) -> list[float]:
    """Log-probs of `targets` [B] under `logits` [B, V] at temperature 1."""
    logits = logits.float()
    logprobs: list[float] = (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=-1)).tolist()
    return logprobs
