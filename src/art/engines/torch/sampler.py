"""Sample tokens from logits: the whole batch at once, each row with its own settings.

Rows are sampled by inverse transform: the token is the first whose cumulative probability exceeds the row's uniform
number. Softmax, cumulative sum and search are much faster than one exponential draw per vocabulary entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from art.engine import GenerateRequest

_MIN_TEMPERATURE = 1e-6
"""Lower temperatures are raised to this. Scaled logits would overflow, and the best token has probability 1 anyway."""
_BLOCK = 1024


@dataclass(slots=True)
class Sampled:
    """Tokens drawn for the B rows of a batch, with their log-probs."""

    token_ids: list[int]  # [B]
    logprobs: list[float]  # [B] NaN where the logits were not finite
    top_logprobs: list[list[tuple[int, float]]] | None  # [B][num_top_logprobs], None if no row asked
    kept: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that a row was drawn from, ascending. Rows whose cut left none out are not listed."""


def sample(
    logits: Tensor,
    uniforms: npt.NDArray[np.float64],
    temperatures: list[float],
    cuts: list[Cut | None],
    num_top_logprobs: list[int],
) -> Sampled:
    """Sample one token per row of `logits` [B, V], with its log-prob under the distribution that it was drawn from.

    Each row has its own random number in [0, 1), in `uniforms`, and its own settings. Temperature 0 is greedy. Tokens
    that a grammar does not allow have logits of minus infinity already.
    """
    logits = logits.float()
    greedy = [t == 0.0 for t in temperatures]
    if any(t not in (0.0, 1.0) for t in temperatures):
        scale = [1.0 / max(t, _MIN_TEMPERATURE) if t else 1.0 for t in temperatures]
        logits = logits * torch.tensor(scale, dtype=torch.float32, device=logits.device)[:, None]
    probs = torch.softmax(logits, dim=-1)
    kept: dict[int, list[int]] = {}
    if any(cuts):
        probs, kept = truncate(probs, cuts)
    tokens = logits.argmax(dim=-1) if all(greedy) else _inverse_transform(probs, uniforms)
    if any(greedy) and not all(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(dim=-1), tokens)
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
    top = _top_logprobs(probs, num_top_logprobs) if any(num_top_logprobs) else None
    return Sampled(tokens.tolist(), logprobs.tolist(), top, kept)


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


_SEARCHED = 1024
"""How many of the best tokens are searched first. Sorting a whole large vocabulary is slow, and rarely needed."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a request leaves out of the distribution that it draws from."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def cut_of(request: GenerateRequest) -> Cut | None:
    """The cut of a request; `None` for the whole distribution. Greedy sampling draws from it all."""
    cut = Cut(request.top_p, request.top_k, request.min_p)
    return None if request.temperature == 0.0 or cut == Cut() else cut


def truncate(probs: Tensor, cuts: list[Cut | None]) -> tuple[Tensor, dict[int, list[int]]]:
    """Keep the likely tokens of each row of `probs` [B, V] that has a cut, and renormalise: [B, V].

    Also returns the ids of the kept tokens, ascending, by row; rows that lost no token are not listed.
    """
    rows = [i for i, cut in enumerate(cuts) if cut is not None]
    chosen = probs[rows]
    limits = _Limits([cut for cut in cuts if cut is not None], chosen)
    size = min(max(_SEARCHED, limits.max_top_k), chosen.shape[1])
    ordered, order = chosen.topk(size, dim=-1)
    kept, is_certain = limits.keep(ordered)
    if size < chosen.shape[1] and not bool(is_certain.all()):
        ordered, order = chosen.sort(dim=-1, descending=True)
        kept, _ = limits.keep(ordered)
    left = torch.zeros_like(chosen).scatter_(1, order, ordered.masked_fill(~kept, 0.0))
    counts = kept.sum(dim=-1)
    is_cut = (counts < (chosen > 0).sum(dim=-1)).tolist()
    reported = {
        row: ids[:count].sort().values.tolist()
        for row, ids, count, cut in zip(rows, order, counts.tolist(), is_cut, strict=True)
        if cut
    }
    index = torch.tensor(rows, device=probs.device)
    return probs.index_copy(0, index, left / left.sum(dim=-1, keepdim=True)), reported


class _Limits:
    """The settings of R rows as columns."""

    def __init__(self, cuts: list[Cut], like: Tensor) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]

        self._num_tokens = like.shape[1]
        self._totals = like.sum(dim=-1, keepdim=True)
        self.max_top_k = max(min(cut.top_k, self._num_tokens) for cut in cuts)
        self._top_k = column([float(min(cut.top_k, self._num_tokens) or self._num_tokens) for cut in cuts])
        self._top_p = column([cut.top_p for cut in cuts])
        self._min_p = column([cut.min_p for cut in cuts])

    def keep(self, ordered: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the best tokens [R, K] stay, and whether a row's answer would be the same with more than K [R]."""
        rank = torch.arange(ordered.shape[1], device=ordered.device)
        in_top_k = rank < self._top_k
        mass = ordered.masked_fill(~in_top_k, 0.0)
        has_all = self._top_k <= ordered.shape[1]
        total = torch.where(has_all, mass.sum(dim=-1, keepdim=True), self._totals)
        # The best token stays even if `top_p` rounds to 0 in this dtype, and 1 keeps what rounding would leave out.
        before = mass.cumsum(dim=-1) - mass
        in_top_p = (before < self._top_p * total) | (self._top_p >= 1.0)
        in_min_p = ordered >= self._min_p * ordered[:, :1]
        kept = in_top_k & in_top_p & in_min_p & (ordered > 0)
        kept[:, 0] = True
        return kept, has_all[:, 0] | ~kept[:, -1]
