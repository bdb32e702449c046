"""Log-probs of targets without a gradient: of the policy as it stands, of the base model, of another checkpoint.

Losses that compare the policy with something frozen (KL, DPO, an anchor at the step's start) read these as *streams* of
the samples. They are computed over the same prefix trees, so a shared prefix is computed once here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from art.trainer.attention import TreeLayout, make_layout
from art.trainer.deal import pack_shares
from art.trainer.distributed import ALONE, Team
from art.trainer.logprobs import group_by_row, target_logprobs
from art.trainer.lora import LoraPolicy
from art.trainer.shard import idle_layout
from art.trainer.tree import FloatArray, SamplePath, build_tree

HiddenStates = Callable[[TreeLayout], Tensor]
"""Final hidden states [T, H] of a layout: `LoraPolicy.hidden_states`, or `base_hidden_states`."""


def add_stream(
    paths: Sequence[SamplePath],
    name: str,
    policy: LoraPolicy,
    hidden_states: HiddenStates,
    *,
    max_tokens: int,
    tick: Callable[[], None] = lambda: None,
    team: Team = ALONE,
) -> list[SamplePath]:
    """`paths` with the log-probs of their targets as stream `name`; `tick` after every forward pass of this process."""
    measured: dict[int, FloatArray] = {}
    shares = pack_shares(paths, max_tokens=max_tokens, num_shares=team.size)
    for indices in shares[team.rank]:
        chosen = [paths[index] for index in indices]
        tree = build_tree(chosen)
        layout = make_layout(tree, device=policy.base.device)
        rows = group_by_row(tree.targets, policy.base.device)
        with torch.no_grad():
            by_row, _ = target_logprobs(hidden_states(layout), policy.base.head, rows)
        logprobs = torch.empty_like(by_row).index_copy_(0, rows.order, by_row).cpu().numpy()
        ends = np.cumsum([len(path.query_positions) for path in chosen])
        parts: list[FloatArray] = np.split(logprobs, ends[:-1])
        measured |= zip(indices, parts, strict=True)
        tick()
    if policy.base.is_sharded:
        for _ in range(max(map(len, shares)) - len(shares[team.rank])):
            with torch.no_grad():
                hidden_states(idle_layout(policy.base.device))
    everything = {index: part for share in team.gather(measured) for index, part in share.items()}
    return [path.with_stream(name, everything[index]) for index, path in enumerate(paths)]
