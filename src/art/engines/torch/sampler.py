"""Sample tokens from logits: the whole batch at once, each row with its own settings.

Rows are sampled by inverse transform: the token is the first whose cumulative probability exceeds the row's uniform
number. Softmax, cumulative sum and search are much faster than one exponential draw per vocabulary entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from art.engine import GenerateRequest

_MIN_TEMPERATURE = 1e-6
"""Lower temperatures are raised to this. Scaled logits would overflow, and the best token has probability 1 anyway."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


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
    top = None
    if any(num_top_logprobs):  # the most likely tokens of each row, best first, without tokens of probability 0
        best, ids = probs.topk(max(num_top_logprobs), dim=-1)
        rows = zip(ids.tolist(), best.log().tolist(), num_top_logprobs, strict=True)
        top = [[pair for pair in zip(i[:n], lps[:n], strict=True) if pair[1] > float("-inf")] for i, lps, n in rows]
    return Sampled(tokens.tolist(), logprobs.tolist(), top, kept)


def _exact_dtype(device: torch.device) -> torch.dtype:
    """Return the type that keeps the tail of a large vocabulary exact. MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _inverse_transform(probs: Tensor, uniforms: npt.NDArray[np.float64]) -> Tensor:
    """The first token of each row whose cumulative probability exceeds the row's uniform number: [B]."""
    exact = _exact_dtype(probs.device)
    cumulative = probs.cumsum(dim=-1, dtype=exact)  # [B, V]
    draws = torch.from_numpy(uniforms).to(exact).to(probs.device)[:, None] * cumulative[:, -1:]
    # A draw that rounds up to the total would be searched past the last possible column.
    draws = torch.minimum(draws, cumulative[:, -1:] * (1.0 - torch.finfo(exact).eps))
    # Only a row of NaN gets a larger index, and its log-prob is NaN.
    return torch.searchsorted(cumulative, draws, right=True).clamp_(max=probs.shape[1] - 1)[:, 0]


def token_logprobs(logits: Tensor, targets: Tensor) -> list[float]:
    """Return the log-probs [B] of the tokens `targets` [B] under `logits` [B, V] at temperature 1."""
    logits = logits.float()
    logprobs: list[float] = (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=-1)).tolist()
    return logprobs


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
    ordered, order = chosen.sort(dim=-1, descending=True)
    kept = _kept(ordered, [cut for cut in cuts if cut is not None])
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


def _kept(ordered: Tensor, cuts: list[Cut]) -> Tensor:
    """Which tokens stay, of R rows of probabilities that are sorted from the largest: [R, V]."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=ordered.dtype, device=ordered.device)[:, None]

    num_tokens = ordered.shape[1]
    top_k = column([float(min(cut.top_k, num_tokens) or num_tokens) for cut in cuts])
    top_p, min_p = column([cut.top_p for cut in cuts]), column([cut.min_p for cut in cuts])
    in_top_k = torch.arange(num_tokens, device=ordered.device) < top_k
    mass = ordered.masked_fill(~in_top_k, 0.0)
    # The best token stays even if `top_p` rounds to 0 in this dtype, and 1 keeps what rounding would leave out.
    before = mass.cumsum(dim=-1) - mass
    in_top_p = (before < top_p * mass.sum(dim=-1, keepdim=True)) | (top_p >= 1.0)
    kept = in_top_k & in_top_p & (ordered >= min_p * ordered[:, :1]) & (ordered > 0)
    kept[:, 0] = True
    return kept


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one random number in [0, 1) per pair of an unsigned 64-bit seed and an index, with 53 random bits: [N].

    It is a pure function of the pair, so a sampled token does not depend on the batch that it was sampled in, or on
    interruptions of its request. The generator is counter-based (splitmix64: Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", 2014).
    """
    # Mix seeds first: else seed s at index i would equal seed s + golden at index i - 1.
    start = _mix(np.array(seeds, dtype=np.uint64))
    state = start + (np.array(indices, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53
