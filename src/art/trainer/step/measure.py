"""Log-probs of targets without a gradient: under the policy at the step's start, the base model, or another checkpoint.

Losses that compare the policy with something frozen (KL, DPO, an anchor at the step's start) read these as *streams* of
the samples. They are computed over the same prefix trees, so a shared prefix is computed once here too.

`with_sampled_base` measures how far the policy has moved from its base model, on a small part of each step.

If a loss compares with the base model, all of its log-probs are known already. Otherwise they are computed for as many
samples as fit into `_BUDGET` of the step's tokens. A forward pass takes a third to a half of the time of training a
token, so the step takes at most about 3 % longer. The samples are neighbours in the prefix tree, starting at a random
place: tokens that they share are computed once, so the budget covers as many targets as possible. If not even the
shortest sample fits (few rollouts with a long prompt), one sample is measured every few steps, and the average cost
stays within the budget. The policy's own log-probs come from the updates, at no cost.

`with_samplers` compares a few stale rollouts of a step with the checkpoints that sampled them.

What an older policy sampled differs from the policy of today for two reasons: the policy has moved, and perhaps the
record is wrong. Their log-ratio alone does not tell which. So for a few of the stale rollouts the trainer computes the
log-probs under the checkpoint that sampled them, and under the policy:

    log pi_v - log mu     v: step that sampled the token. It is noise if the record is right, whatever was trained since
    log pi   - log pi_v   how far the policy has moved, by the trainer alone

The gate judges these rollouts by the first, and widens the bounds of the other stale ones by the second
(`gate.py`). Several rollouts of a group share their prompt. Two passes without gradient over a
sixteenth of the tokens make the step about 5 % longer, or more if its rollouts are few. Without stale rollouts it costs
nothing.
"""

from __future__ import annotations

import contextlib
import math
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from art.errors import ConfigError
from art.storage import checkpoints
from art.trainer.attention.tree_attention import TreeLayout
from art.trainer.gate import Drift
from art.trainer.policy.base_model import BaseModel
from art.trainer.policy.policy import Policy
from art.trainer.step.logprobs import target_logprobs
from art.trainer.step.micro_batch import MicroBatch, MicroBatcher, Progress, count_idle_passes, idle_layout, run_fitting
from art.trainer.streams import ANCHOR, BASE, POLICY, SAMPLED_BASE, SAMPLER
from art.trainer.tree.pack import group_by_rollout, group_samples
from art.trainer.tree.tree import FloatArray, SamplePath, sort_paths

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
    order, shared = sort_paths(paths)
    ranks = [rank for rank, index in enumerate(order) if paths[index].sample.component == "rl"]
    if not ranks:
        return []
    lengths = [paths[index].num_tokens for index in order]
    budget = _BUDGET * (sum(lengths) - sum(shared))
    every = math.ceil(min(lengths[rank] for rank in ranks) / budget)
    if (step + 1) % every:
        return []
    left = every * budget
    chosen: list[int] = []  # ranks
    first = zlib.crc32(str(step).encode()) % len(ranks)
    for rank in ranks[first:] + ranks[:first]:
        # Two paths share the minimum of what the neighbours between them share.
        is_later = bool(chosen) and chosen[-1] < rank
        cost = lengths[rank] - (min(shared[chosen[-1] + 1 : rank + 1]) if is_later else 0)
        if cost <= left:
            chosen.append(rank)
            left -= cost
        elif chosen:
            break
    return sorted(order[rank] for rank in chosen)


_LEAST_ROLLOUTS = 8
"""Number of rollouts that are compared, even if they are longer than the budget: fewer do not tell how much they differ
from one another."""
_MOST_OF_GROUP = 4
"""Most rollouts of one group: they share their prompt, which makes them cheap, but also what they learnt."""


def with_samplers(
    paths: list[SamplePath], measurer: Measurer, *, step: int
) -> tuple[list[SamplePath], Drift | None, dict[str, float]]:
    """Add to some of the stale rollouts the log-probs under the checkpoint that sampled each token (`SAMPLER`).

    Returns:
        The samples; how far the policy has moved since, `None` if nothing could be compared; and metrics.

    Raises:
        AdapterError, CorruptCheckpointError: a checkpoint is damaged.
    """
    chosen = choose_stale(paths, measurer.checkpoints, step=step)
    if not chosen:
        return paths, None, {}
    few = [paths[index] for index in chosen]
    if not all(ANCHOR in path.streams for path in few):
        few = measurer.add_stream(few, POLICY, ANCHOR)
    now = [path.streams[ANCHOR] for path in few]
    before = _under_samplers(few, now, measurer, step=step)
    drift, num_rollouts = _measure(few, now, before, step=step)
    known = dict(zip(chosen, before, strict=True))
    return (
        [
            path.with_stream(SAMPLER, known.get(index, np.full_like(path.sampling_logprobs, np.nan)))
            for index, path in enumerate(paths)
        ],
        drift,
        {
            "offpolicy/drift_rms": drift.rms,
            "offpolicy/drift_scatter": drift.scatter,
            "offpolicy/stale_rollouts_checked": float(num_rollouts),
        },
    )


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


def _under_samplers(
    paths: list[SamplePath], now: list[FloatArray], measurer: Measurer, *, step: int
) -> list[FloatArray]:
    """The log-probs of each sample's targets, [N] each, under the checkpoint that sampled them."""
    known = [values.copy() for values in now]
    for version in sorted({int(version) for path in paths for version in path.policy_versions} - {step}):
        own = [index for index, path in enumerate(paths) if (path.policy_versions == version).any()]
        measured = measurer.add_stream([paths[index] for index in own], version, SAMPLER)
        for index, path in zip(own, measured, strict=True):
            np.copyto(known[index], path.streams[SAMPLER], where=path.policy_versions == version)
    return known


def _measure(
    paths: list[SamplePath], now: list[FloatArray], before: list[FloatArray], *, step: int
) -> tuple[Drift, int]:
    """How far the policy has moved, over the stale tokens of `paths`, and the number of rollouts."""
    changes: dict[str, list[FloatArray]] = {}
    for path, after, at_first in zip(paths, now, before, strict=True):
        changes.setdefault(path.sample.rollout_id, []).append((after - at_first)[path.policy_versions < step])
    rollouts = [np.concatenate(parts).astype(np.float64) for parts in changes.values()]
    return Drift.over(rollouts, num_groups=len(group_samples(paths))), len(rollouts)
