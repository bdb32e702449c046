"""Log-probs of targets without a gradient: under the policy at the step's start, the base model, or another checkpoint.

Losses that compare the policy with something frozen (KL, DPO, an anchor at the step's start) read these as *streams* of
the samples. They are computed over the same prefix trees, so a shared prefix is computed once here too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from art.errors import ConfigError
from art.storage import checkpoints
from art.trainer.attention.tree_attention import TreeLayout
from art.trainer.machine.shard import idle_layout
from art.trainer.policy.base_model import BaseModel
from art.trainer.policy.policy import Policy
from art.trainer.step.logprobs import target_logprobs
from art.trainer.step.micro_batch import MicroBatch, MicroBatcher, count_idle_passes, run_fitting
from art.trainer.step.progress import Progress
from art.trainer.streams import BASE
from art.trainer.tree.tree import FloatArray, SamplePath

HiddenStates = Callable[[TreeLayout], Tensor]
"""Function that computes the final hidden states [T, H] of a layout, under the policy or the base model."""


class Measurer:
    """Adds log-probs under the policy, base model or other checkpoints to a step's samples, before its first update."""

    def __init__(
        self, policy: Policy, batcher: MicroBatcher, progress: Progress, references: Mapping[int, Path] | None = None
    ) -> None:
        """`references` are the checkpoints that may be compared with, by step."""
        self._policy = policy
        self._batcher = batcher
        self._progress = progress
        self._references = references or {}

    @property
    def checkpoints(self) -> Collection[int]:
        """The steps of the checkpoints that can be a `source`."""
        return self._references.keys()

    def add_stream(self, paths: list[SamplePath], source: int | str, name: str) -> list[SamplePath]:
        """Return `paths` with one more stream `name`: the log-probs of all targets under the weights `source`.

        `source` is `POLICY`, `BASE`, or the step of a checkpoint.

        Raises:
            ConfigError: the checkpoint is not among the references.
            TrainingError: a single sample does not fit into memory.
        """
        hidden_states = self._policy.base_hidden_states if source == BASE else self._policy.hidden_states
        with contextlib.ExitStack() as stack:
            if isinstance(source, int):
                if source not in self._references:
                    raise ConfigError(
                        f"the loss compares with checkpoint {source}, which was not given to the trainer", param="loss"
                    )
                checkpoints.verify(self._references[source])
                stack.enter_context(self._policy.using(self._references[source] / self._policy.weights_file))
            self._batcher.team.gather(None)  # nobody begins before all processes have read the weights
            return add_stream(paths, name, hidden_states, self._batcher, self._progress)


def add_stream(
    paths: list[SamplePath],
    name: str,
    hidden_states: HiddenStates,
    batcher: MicroBatcher,
    progress: Progress | None = None,
) -> list[SamplePath]:
    """Return `paths` with the log-probs of all their targets under the model `hidden_states`, as stream `name`.

    Where memory runs out, smaller micro-batches are used, and `batcher` makes smaller ones from then on: what does not
    fit without a gradient does not fit with one.

    Raises:
        TrainingError: a single sample does not fit into memory.
    """
    base, team = batcher.base, batcher.team
    micro_batches = batcher.split(paths)
    num_idle = count_idle_passes(micro_batches, base, team)

    def measure(micro_batches: Iterator[MicroBatch]) -> dict[int, FloatArray]:
        measured: dict[int, FloatArray] = {}  # by id of the path
        with torch.no_grad():
            for micro_batch in micro_batches:
                logprobs = target_logprobs_in_order(micro_batch, base, hidden_states)
                ends = np.cumsum([len(path.query_positions) for path in micro_batch.paths])
                measured |= zip(map(id, micro_batch.paths), np.split(logprobs, ends[:-1]), strict=True)
                if progress is not None:
                    progress.tick()
            for _ in range(num_idle):
                hidden_states(idle_layout(base.device))
        return measured

    measured, fitting = run_fitting(micro_batches, measure, base)
    own = {index: measured[id(path)] for index, path in enumerate(paths) if id(path) in measured}
    gathered = team.gather((own, fitting))
    batcher.shrink(min((fitting for _, fitting in gathered if fitting is not None), default=None))
    everything = {index: logprobs for share, _ in gathered for index, logprobs in share.items()}
    return [path.with_stream(name, everything[index]) for index, path in enumerate(paths)]


def target_logprobs_in_order(micro_batch: MicroBatch, base: BaseModel, hidden_states: HiddenStates) -> FloatArray:
    """Compute the log-probs [N] of a micro-batch's targets, in the order of `micro_batch.targets`."""
    rows = micro_batch.rows
    by_row, _ = target_logprobs(hidden_states(micro_batch.layout), base.head, rows)
    logprobs: FloatArray = rows.spread(by_row).numpy()
    return logprobs
