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
        scale = [1.0 / t if t else 1.0 for t in params.temperatures]
        logits = logits * torch.tensor(scale, dtype=torch.float32, device=logits.device)[:, None]
    probs = torch.softmax(logits, dim=-1)
    if any(p < 1.0 for p in params.top_ps):
        probs = _keep_nucleus(probs, params.top_ps, greedy)
    tokens = logits.argmax(dim=-1) if all(greedy) else _inverse_transform(probs, params.uniforms)
    if any(greedy) and not all(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(dim=-1), tokens)
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
    top = _top_logprobs(probs, params.num_top_logprobs) if any(params.num_top_logprobs) else None
    return Sampled(tokens.tolist(), logprobs.tolist(), top)


def _inverse_transform(probs: Tensor, uniforms: npt.NDArray[np.float64]) -> Tensor:
    """The first token of each row whose cumulative probability exceeds the row's uniform number: [B]."""
    # Double precision keeps the tail of a large vocabulary exact; MPS has none.
    dtype = torch.float32 if probs.device.type == "mps" else torch.float64
    cumulative = torch.cumsum(probs, dim=-1, dtype=dtype)
    total = cumulative[:, -1:]
    draws = torch.from_numpy(uniforms).to(device=probs.device, dtype=dtype)[:, None] * total
    # Rounding must not push a draw onto the total: the search would run past the last possible token.
    draws = torch.minimum(draws, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, draws, right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[1] - 1)  # only a row of NaN gets here; its log-prob says so


def _keep_nucleus(probs: Tensor, top_ps: list[float], greedy: list[bool]) -> Tensor:
    """`probs` with everything outside each row's smallest set of mass `top_p` set to 0, renormalised: [B, V]."""
    limits = torch.tensor(
        [2.0 if g or p >= 1.0 else p for p, g in zip(top_ps, greedy, strict=True)],
        dtype=probs.dtype,
        device=probs.device,
    )
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= limits[:, None], 0.0)
    kept = torch.zeros_like(probs).scatter_(1, order, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)


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
