"""Describe what a planned step does with each submitted rollout, for the record of the step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from art.credit.plan_findings import LeftOut
from art.credit.resolve import ResolvedGroup, ResolvedTrajectory
from art.credit.samples import PlannedSample
from art.storage.steps.plan_record import GroupPlan, RolloutPlan


def describe_groups(
    groups: Sequence[ResolvedGroup],
    samples: Sequence[PlannedSample],
    dropped: Mapping[str, str],
    left_out: LeftOut,
    *,
    has_advantages: bool,
) -> list[GroupPlan]:
    """Describe the groups of a request and their rollouts, in their order.

    Args:
        dropped: by the label of each rollout that is left out, the reason.
        has_advantages: whether the plan computes advantages. Preference losses and distillation have none.
    """
    by_rollout: dict[str, list[PlannedSample]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout_id, []).append(sample)
    described = []
    for group in groups:
        reason = _left_out(group.label, left_out)
        knows = has_advantages and reason is None
        rollouts = [
            _describe(trajectory, by_rollout.get(trajectory.label, []), dropped.get(trajectory.label), knows)
            for trajectory in group.trajectories
        ]
        described.append(GroupPlan(index=_place(group.label), left_out=reason, rollouts=rollouts))
    return described


def _describe(
    trajectory: ResolvedTrajectory, samples: Sequence[PlannedSample], reason: str | None, has_advantage: bool
) -> RolloutPlan:
    answers = [answer for sample in samples for answer in sample.answers if answer.num_tokens]
    advantage = None
    if has_advantage and answers:
        advantage = float(np.concatenate([answer.token_advantages() for answer in answers]).mean())
    return RolloutPlan(
        index=_place(trajectory.label),
        label=trajectory.label,
        reward=trajectory.reward if trajectory.has_reward else None,
        advantage=advantage,
        exchange_ids=[[answer.exchange_id for answer in path.answers] for path in trajectory.paths],
        context_tokens=trajectory.context_tokens,
        trained_tokens=sum(answer.num_tokens for answer in answers),
        dropped_tokens={} if reason is None else {reason: trajectory.sampled_tokens},
        untracked_choices=trajectory.untracked_choices,
    )


def _left_out(label: str, left_out: LeftOut) -> Literal["equal_rewards", "no_rewards", "single_rollout"] | None:
    if label in left_out.equal:
        return "equal_rewards"
    if label in left_out.unrewarded:
        return "no_rewards"
    return "single_rollout" if label in left_out.single else None


def _place(label: str) -> int:
    """The last index in a label, e.g. 5 in `groups[2].trajectories[5]`."""
    return int(re.findall(r"\[(\d+)\]", label)[-1])
