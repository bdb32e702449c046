"""Compare a few stale rollouts of a step with the checkpoints that sampled them.

What an older policy sampled differs from the policy of today for two reasons: the policy has moved, and perhaps the
record is wrong. Their log-ratio alone does not tell which. So for a few of the stale rollouts the trainer computes the
log-probs under the checkpoint that sampled them, and under the policy:

    log pi_v - log mu     v: step that sampled the token. It is noise if the record is right, whatever was trained since
    log pi   - log pi_v   how far the policy has moved, by the trainer alone

The gate judges these rollouts by the first, and widens the bounds of the other stale ones by the second
(`gate/gate.py`). Several rollouts of a group share their prompt. Two passes without gradient over a
sixteenth of the tokens make the step about 5 % longer, or more if its rollouts are few. Without stale rollouts it costs
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import numpy as np

from art.trainer.gate.gate import Drift
from art.trainer.step.measure import Measurer
from art.trainer.streams import ANCHOR, POLICY, SAMPLER
from art.trainer.tree.pack import group_by_rollout, group_samples
from art.trainer.tree.tree import FloatArray, SamplePath

_BUDGET = 1 / 16
"""Share of the step's tokens that may be computed for the comparison, in each of two passes."""
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
