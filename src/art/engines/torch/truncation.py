"""Drawing only from the more likely tokens: `top_k`, then `top_p`, then `min_p`, each on what the one before left."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from art.engine import GenerateRequest

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
