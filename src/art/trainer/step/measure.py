"""Log-probs of targets without a gradient: of the policy as it stands, of the base model, of another checkpoint.

Losses that compare the policy with something frozen (KL, DPO, an anchor at the step's start) read these as *streams* of
the samples. They are computed over the same prefix trees, so a shared prefix is computed once here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from art.trainer.attention.tree_attention import TreeLayout
from art.trainer.machine.distributed import ALONE, Team
from art.trainer.machine.shard import idle_layout
from art.trainer.policy.base_model import BaseModel
from art.trainer.step.logprobs import target_logprobs
from art.trainer.step.micro_batch import MicroBatch, count_idle_passes, run_fitting, split_micro_batches
from art.trainer.tree.tree import FloatArray, SamplePath

HiddenStates = Callable[[TreeLayout], Tensor]
"""Final hidden states [T, H] of a layout: `Policy.hidden_states`, or `base_hidden_states`."""


def add_stream(
    paths: list[SamplePath],
    name: str,
    base: BaseModel,
    hidden_states: HiddenStates,
    *,
    max_tokens: int,
    tick: Callable[[], None] = lambda: None,
    team: Team = ALONE,
) -> tuple[list[SamplePath], int | None]:
    """Measure the log-probs of all targets; `tick` after every forward pass of this process.

    Returns:
        `paths` with them as stream `name`; and the most tokens in a micro-batch that fitted into memory, if larger ones
        did not. The same on every process.

    Raises:
        TrainingError: a single sample does not fit into memory.
    """
    micro_batches = split_micro_batches(paths, base, max_tokens=max_tokens, team=team)
    num_idle = count_idle_passes(micro_batches, base, team)

    def measure(micro_batches: Iterator[MicroBatch]) -> dict[int, FloatArray]:
        measured: dict[int, FloatArray] = {}  # by id of the path
        with torch.no_grad():
            for micro_batch in micro_batches:
                logprobs = target_logprobs_in_order(micro_batch, base, hidden_states)
                ends = np.cumsum([len(path.query_positions) for path in micro_batch.paths])
                measured |= zip(map(id, micro_batch.paths), np.split(logprobs, ends[:-1]), strict=True)
                tick()
            for _ in range(num_idle):
                hidden_states(idle_layout(base.device))
        return measured

    measured, fitting = run_fitting(micro_batches, measure, base)
    own = {index: measured[id(path)] for index, path in enumerate(paths) if id(path) in measured}
    gathered = team.gather((own, fitting))
    everything = {index: logprobs for share, _ in gathered for index, logprobs in share.items()}
    with_stream = [path.with_stream(name, everything[index]) for index, path in enumerate(paths)]
    return with_stream, min((fitting for _, fitting in gathered if fitting is not None), default=None)


def target_logprobs_in_order(micro_batch: MicroBatch, base: BaseModel, hidden_states: HiddenStates) -> FloatArray:
    """[N] log-probs of the targets, in the targets' own order."""
    rows = micro_batch.rows
    by_row, _ = target_logprobs(hidden_states(micro_batch.layout), base.head, rows)
    logprobs: FloatArray = torch.empty_like(by_row).index_copy_(0, rows.order, by_row).cpu().numpy()
    return logprobs
