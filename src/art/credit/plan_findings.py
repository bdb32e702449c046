"""Describe the plan of a step: for people, which groups are left out and why nothing is trained; for the record of the
step, what it does with each submitted rollout.

A finding is "what was seen: what it means". Clients log each meaning once, so numbers belong in the first part.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from art.credit.resolve import ResolvedGroup, ResolvedTrajectory
from art.credit.samples import PlannedSample
from art.storage.steps.plan_record import GroupPlan, RolloutPlan

_MAX_NAMES = 12
"""Largest number of groups or trajectories that a finding names."""
_NO_STEP = "so no step was trained and the model is where it was"

NO_OBSERVATIONS = (
    "`observation_weight` is set, but no rollout has a message of the environment between two answers whose tokens "
    "continue one another: there was no observation to learn"
)


@dataclass(slots=True)
class LeftOut:
    """Labels of groups that teach nothing, by reason."""

    equal: list[str] = field(default_factory=list)
    """Groups whose rewards are all the same."""
    unrewarded: list[str] = field(default_factory=list)
    """Groups in which no trajectory was given a reward."""
    single: list[str] = field(default_factory=list)
    """Groups of one trajectory."""
    truncated: list[str] = field(default_factory=list)
    """Trajectories that `mask_truncated` leaves out of groups that are trained."""

    def reason(self, label: str) -> Literal["equal_rewards", "no_rewards", "single_rollout"] | None:
        """Why a group teaches nothing; `None` if it teaches something."""
        if label in self.equal:
            return "equal_rewards"
        if label in self.unrewarded:
            return "no_rewards"
        return "single_rollout" if label in self.single else None

    def note(self, label: str, compared: Sequence[ResolvedTrajectory]) -> None:
        """Add a group whose trajectories `compared` have no spread of rewards."""
        if len(compared) == 1:
            self.single.append(label)
        elif any(trajectory.has_reward for trajectory in compared):
            self.equal.append(label)
        elif compared:
            self.unrewarded.append(label)


def describe_left_out(left_out: LeftOut, trajectories: Sequence[ResolvedTrajectory], learner: str | None) -> list[str]:
    """Make one finding for each reason for which groups or trajectories teach nothing, with their names.

    Args:
        learner: what still learns from a group without spread, e.g. "distillation".
    """
    consequence = "nothing to learn" if learner is None else f"only {learner} learns from it"
    silent = [trajectory.label for trajectory in trajectories if trajectory.sampled_tokens == 0]
    reasons = (
        (left_out.equal, f"all rewards are equal, {consequence}"),
        (left_out.unrewarded, f"no trajectory was ever given a reward, {consequence}"),
        (left_out.single, f"a single trajectory has no other to be compared with, {consequence}"),
        (left_out.truncated, "the token limit cut off an answer, and `mask_truncated` leaves such rollouts out"),
        (silent, "no tokens that this model sampled, so there is nothing of it to train"),
    )
    return [f"{_names(labels)}: {text}" for labels, text in reasons if labels]


def describe_nothing(left_out: LeftOut, trajectories: Sequence[ResolvedTrajectory], num_groups: int) -> str:
    """Explain why a step trains nothing although its trajectories are valid."""
    if not any(trajectory.sampled_tokens for trajectory in trajectories):
        return (
            f"none of the {len(trajectories)} trajectories holds an answer of this model: the rollouts ended before "
            f"it said anything, {_NO_STEP}. Read one of them"
        )
    if len(left_out.truncated) == sum(trajectory.sampled_tokens > 0 for trajectory in trajectories):
        return (
            f"the token limit cut off an answer in each of the {len(trajectories)} trajectories, and `mask_truncated` "
            f"leaves such rollouts out, {_NO_STEP}. Raise `max_completion_tokens`, or set `mask_truncated=False`"
        )
    if len(left_out.unrewarded) == num_groups:
        return (
            f"none of the {len(trajectories)} trajectories was ever given a reward: all count as 0, {_NO_STEP}. Set "
            "`trajectory.reward` in the rollout, or score the groups before they are trained"
        )
    if len(left_out.single) == num_groups:
        return (
            f"every group ({num_groups}) holds a single trajectory: a reward counts in comparison with other rollouts "
            f"of the same group, {_NO_STEP}. Put several rollouts of a scenario into each group, as "
            "`art.TrajectoryGroup(rollout(model, scenario) for _ in range(8))` does"
        )
    if len(left_out.equal) == num_groups:
        mean = statistics.fmean(trajectory.reward for trajectory in trajectories)
        return (
            f"every group ({num_groups}) has equal rewards (their mean is {mean:.3g}): there is nothing to learn from, "
            f"{_NO_STEP}. Give rewards that differ within a group, use more rollouts per group, or harder or easier "
            "scenarios"
        )
    return (
        f"none of the {num_groups} groups can be learnt from: their rewards do not differ, have nothing to be "
        f"compared with or were cut off, {_NO_STEP}. The other findings name the groups"
    )


def describe_untracked(trajectories: Sequence[ResolvedTrajectory]) -> str | None:
    """Explain why nothing can be trained if trajectories hold answers, but this model has sampled none; else `None`."""
    counts = {
        "choices without an exchange id": sum(trajectory.untracked_choices for trajectory in trajectories),
        "messages of the assistant that are no choices": sum(trajectory.copied_answers for trajectory in trajectories),
        "tokens that another model sampled": sum(trajectory.context_tokens for trajectory in trajectories),
    }
    if not any(counts.values()) or any(trajectory.sampled_tokens for trajectory in trajectories):
        return None
    return (
        f"none of the {len(trajectories)} trajectories holds tokens that this model sampled, but "
        f"{', '.join(f'{count} {what}' for what, count in counts.items() if count)}. Append the `Choice` objects of "
        "`model.openai_client()` to `messages_and_choices`, not copies of their text"
    )


def describe_twins(labels: list[str]) -> str:
    """Say which trajectories hold the very answers of an earlier trajectory of the step."""
    return (
        f"{_names(labels)}: the same recorded answers as an earlier trajectory of this step, so each counts as often "
        "as it was given. Submit each rollout once, in one group"
    )


def describe_repeated(num_answers: int, step: int) -> str:
    """Say that every answer of a step was trained before."""
    return (
        f"all {num_answers} answers of this step were trained already, in step {step}: the policy that gave them is "
        "no longer the one that is trained. Gather new groups for each step"
    )


def _names(labels: list[str]) -> str:
    more = len(labels) - _MAX_NAMES
    return ", ".join(labels[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


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
        reason = left_out.reason(group.label)
        knows = has_advantages and reason is None
        rollouts = [
            _describe(trajectory, by_rollout.get(trajectory.label, []), dropped.get(trajectory.label), knows)
            for trajectory in group.trajectories
        ]
        described.append(GroupPlan(index=group.index, left_out=reason, rollouts=rollouts))
    return described


def _describe(
    trajectory: ResolvedTrajectory, samples: Sequence[PlannedSample], reason: str | None, has_advantage: bool
) -> RolloutPlan:
    answers = [answer for sample in samples for answer in sample.answers if answer.num_tokens]
    advantage = None
    if has_advantage and answers:
        advantage = float(np.concatenate([answer.token_advantages() for answer in answers]).mean())
    return RolloutPlan(
        index=trajectory.index,
        label=trajectory.label,
        reward=trajectory.reward if trajectory.has_reward else None,
        advantage=advantage,
        exchange_ids=[[answer.exchange_id for answer in path.answers] for path in trajectory.paths],
        context_tokens=trajectory.context_tokens,
        trained_tokens=sum(answer.num_tokens for answer in answers),
        dropped_tokens={} if reason is None else {reason: trajectory.sampled_tokens},
        untracked_choices=trajectory.untracked_choices,
    )
