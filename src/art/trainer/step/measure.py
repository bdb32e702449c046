"""Log-probs of targets without a gradient: under the policy at the step's start, the base model, or another checkpoint.

Losses that compare the policy with something frozen (KL, DPO, an anchor at the step's start) read these as *streams* of
the samples. They are computed over the same prefix trees, so a shared prefix is computed once here too.

`with_sampled_base` measures how far the policy is from its base model, on a sixteenth of each step's tokens. That
makes a step of 16 rollouts or more about 3 % longer. The policy's own log-probs come from the updates, at no cost.

`with_samplers` compares a few stale rollouts with the checkpoints that sampled them. What an older policy sampled
differs from the policy of today because the policy has moved, and perhaps because the record is wrong. Their log-ratio
alone does not tell which. But log pi_v - log mu, where v is the step that sampled the token, is noise if the record is
right, whatever was trained since. It is computed for a sixteenth of the tokens, and the gate judges by it (`gate.py`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from art.errors import ConfigError
from art.storage import checkpoints
from art.trainer.logprobs import target_logprobs
from art.trainer.policy.base_model import FrozenModel
from art.trainer.policy.policy import Policy
from art.trainer.step.micro_batch import (
    MicroBatch,
    MicroBatcher,
    StepProgress,
    count_idle_passes,
    idle_layout,
    run_fitting,
)
from art.trainer.tree import (
    BASE,
    SAMPLED_BASE,
    SAMPLER,
    FloatArray,
    SamplePath,
    group_by_rollout,
    group_samples,
)
from art.trainer.tree_attention import TreeLayout


class Measurer:
    """Adds log-probs under the policy, base model or other checkpoints to a step's samples, before its first update."""

    def __init__(
        self,
        policy: Policy,
        batcher: MicroBatcher,
        progress: StepProgress | None = None,
        references: Mapping[int, Path] | None = None,
    ) -> None:
        """`references` are the checkpoints that may be compared with, by step."""
        self.references = references or {}
        self._policy = policy
        self._batcher = batcher
        self._progress = progress

    def add_stream(self, paths: list[SamplePath], source: int | str, name: str) -> list[SamplePath]:
        """Return `paths` with one more stream `name`: the log-probs of all targets under the weights `source`.

        `source` is `POLICY`, `BASE`, or the step of a checkpoint. Where memory runs out, smaller micro-batches are
        used, and the batcher makes smaller ones from then on: what does not fit without a gradient does not fit with
        one.

        Raises:
            ConfigError: the checkpoint is not among the references.
            TrainingError: a single sample does not fit into memory.
        """
        base, team = self._batcher.base, self._batcher.team
        hidden_states = self._policy.base_hidden_states if source == BASE else self._policy.hidden_states
        with contextlib.ExitStack() as stack:
            if isinstance(source, int):
                if source not in self.references:
                    raise ConfigError(
                        f"the loss compares with checkpoint {source}, which was not given to the trainer", param="loss"
                    )
                checkpoints.verify(self.references[source])
                stack.enter_context(self._policy.using(self.references[source] / self._policy.weights_file))
            team.gather(None)  # nobody begins before all processes have read the weights
            micro_batches = self._batcher.split(paths)
            num_idle = count_idle_passes(micro_batches, base, team)

            def measure(micro_batches: Iterator[MicroBatch]) -> dict[int, FloatArray]:
                measured: dict[int, FloatArray] = {}  # by id of the path
                for micro_batch in micro_batches:
                    logprobs = target_logprobs_in_order(micro_batch, base, hidden_states)
                    ends = np.cumsum([len(path.query_positions) for path in micro_batch.paths])
                    measured |= zip(map(id, micro_batch.paths), np.split(logprobs, ends[:-1]), strict=True)
                    if self._progress is not None:
                        self._progress.tick()
                for _ in range(num_idle):
                    hidden_states(idle_layout(base.device))
                return measured

            stack.enter_context(torch.no_grad())
            measured, fitting = run_fitting(micro_batches, measure, base)
            own = {index: measured[id(path)] for index, path in enumerate(paths) if id(path) in measured}
            gathered = team.gather((own, fitting))
        self._batcher.shrink(min((fitting for _, fitting in gathered if fitting is not None), default=None))
        everything = {index: logprobs for share, _ in gathered for index, logprobs in share.items()}
        return [path.with_stream(name, everything[index]) for index, path in enumerate(paths)]


def target_logprobs_in_order(
    micro_batch: MicroBatch, base: FrozenModel, hidden_states: Callable[[TreeLayout], Tensor]
) -> FloatArray:
    """Compute the log-probs [N] of a micro-batch's targets, in the order of `micro_batch.targets`.

    `hidden_states` computes the final hidden states [T, H] of a layout, under the policy or the base model.
    """
    rows = micro_batch.rows
    by_row, _ = target_logprobs(hidden_states(micro_batch.layout), base.head, rows)
    logprobs: FloatArray = rows.spread(by_row).numpy()
    return logprobs


_BUDGET = 1 / 16
"""Share of the step's tokens that may be computed for one pass over other weights."""


def with_sampled_base(paths: list[SamplePath], measurer: Measurer, *, step: int) -> list[SamplePath]:
    """Add the base model's log-probs (stream `SAMPLED_BASE`) to some of the samples, unless all have them (`BASE`)."""
    if all(BASE in path.streams for path in paths):
        return paths
    chosen = choose_paths(paths, step=step)
    if not chosen:
        return paths
    sampled = measurer.add_stream([paths[index] for index in chosen], BASE, SAMPLED_BASE)
    measured = dict(zip(chosen, sampled, strict=True))
    return [
        measured.get(index) or path.with_stream(SAMPLED_BASE, np.full_like(path.sampling_logprobs, np.nan))
        for index, path in enumerate(paths)
    ]


def choose_paths(paths: Sequence[SamplePath], *, step: int) -> list[int]:
    """Choose by index the samples whose KL to the base model is measured. A repeated step chooses the same."""
    order = [index for index, path in enumerate(paths) if path.sample.component == "rl"]
    random.Random(step).shuffle(order)
    budget = _BUDGET * sum(path.num_tokens for path in paths)
    ends = accumulate(paths[index].num_tokens for index in order)
    return sorted([index for index, end in zip(order, ends, strict=True) if end <= budget] or order[:1])


_LEAST_ROLLOUTS = 8
"""Rollouts that are compared even if they are longer than the budget: fewer do not tell how much they differ."""
_MOST_OF_GROUP = 4
"""Most rollouts of one group: they share their prompt, which makes them cheap, but also what they learnt."""


def with_samplers(
    paths: list[SamplePath], measurer: Measurer, *, step: int
) -> tuple[list[SamplePath], dict[str, float]]:
    """Add to some of the stale rollouts the log-probs under the checkpoint that sampled each token (`SAMPLER`).

    They are NaN for tokens that the policy of this `step` sampled. Returns the samples, and metrics.
    """
    chosen = choose_stale(paths, measurer.references.keys(), step=step)
    if not chosen:
        return paths, {}
    streams = [np.full_like(path.sampling_logprobs, np.nan) for path in paths]
    for version in sorted({int(version) for index in chosen for version in paths[index].policy_versions} - {step}):
        own = [index for index in chosen if (paths[index].policy_versions == version).any()]
        for index, path in zip(own, measurer.add_stream([paths[i] for i in own], version, SAMPLER), strict=True):
            np.copyto(streams[index], path.streams[SAMPLER], where=path.policy_versions == version)
    num_rollouts = len({paths[index].sample.rollout_id for index in chosen})
    with_stream = [path.with_stream(SAMPLER, stream) for path, stream in zip(paths, streams, strict=True)]
    return with_stream, {"offpolicy/stale_rollouts_checked": float(num_rollouts)}


def choose_stale(paths: Sequence[SamplePath], checkpoints: Collection[int], *, step: int) -> list[int]:
    """Choose by index the samples of the stale rollouts to compare. A repeated step chooses the same.

    All versions of a rollout must be among `checkpoints`, or be `step` itself.
    """
    index_of = {id(path): index for index, path in enumerate(paths)}
    groups = group_samples([path for path in paths if path.sample.component == "rl"])
    random.Random(step).shuffle(groups)
    left = _BUDGET * sum(path.num_tokens for path in paths)
    chosen: list[int] = []
    num_rollouts = 0
    for rollout in (rollout for group in groups for rollout in group_by_rollout(group)[:_MOST_OF_GROUP]):
        versions = {int(version) for path in rollout for version in path.policy_versions}
        if versions <= {step} or not versions <= {step, *checkpoints}:
            continue
        left -= sum(path.num_tokens for path in rollout)
        if left < 0 and num_rollouts >= _LEAST_ROLLOUTS:
            break
        chosen += [index_of[id(path)] for path in rollout]
        num_rollouts += 1
    return sorted(chosen)
