"""What one forward pass computes: a packed, ragged batch of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from art.engines.torch.attention import AttentionPlan
from art.engines.torch.linear import Run


@dataclass(slots=True)
class Batch:
    """N tokens, ordered so that each adapter's are contiguous.

    Example: two sequences decode, a prompt of 3 tokens starts, all with one adapter A
        token_ids    [41, 7, 1, 8, 9]
        positions    [12, 5, 0, 1, 2]
        runs         [Run(0, 5, A)]
        sample_rows  [0, 1, 4]
        head_runs    [Run(0, 3, A)]
    """

    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    plan: AttentionPlan
    runs: list[Run] = field(default_factory=list)
    sample_rows: Tensor | None = None
    """Tokens whose logits are wanted, ascending; `None` for all."""
    head_runs: list[Run] = field(default_factory=list)
    """`runs` in terms of `sample_rows`."""
