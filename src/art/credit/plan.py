"""Decide what a reinforcement-learning step trains, and account for what it does not.

ResolvedGroup[] --select (advantages, or preference pairs)--> --weigh--> StepPlan (samples, pairs, ledger)

The plan also says, for people, which groups are left out and why nothing is trained, and for the record of the step,
what it does with each submitted rollout. A finding is "what was seen: what it means". Clients log each meaning once, so
numbers belong in the first part.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from art.config import DpoConfig, TrainConfig
from art.credit.advantages import GroupAdvantages, RolloutAdvantages, check_finite, compute_advantages, preference_pair
from art.credit.ledger import describe_step, open_ledger
from art.credit.resolve import ResolvedGroup, ResolvedPath, ResolvedTrajectory
from art.credit.samples import PlannedAnswer, PlannedSample, teacher_name
from art.errors import NothingTrainableError
from art.storage.step_files import GroupPlan, RolloutPlan

_MAX_NAMES = 12
"""Largest number of groups or trajectories that a finding names."""
_NO_STEP = "so no step was trained and the model is where it was"
_GroupReason: TypeAlias = Literal["equal_rewards", "no_rewards", "single_rollout"]
"""Why a group teaches nothing by its rewards: all are the same, none was given, or there is one rollout."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The samples of one training step, its metrics, and the account of the sampled tokens that it leaves out."""

    samples: list[PlannedSample] = field(default_factory=list)
    """Empty if no rollout can be learnt from; then the first of `findings` says why."""
    observations: list[PlannedSample] = field(default_factory=list)
    """What the environment answered in the rollouts, to be learnt by cross-entropy."""
    ledger: dict[str, float] = field(default_factory=dict)
    """Number of sampled tokens that are trained, context or dropped (`ledger.py`); empty for supervised fine-tuning."""
    metrics: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    """What a person should know, in plain words, e.g. which groups were left out."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Preference pairs of rollout ids, (chosen, rejected), for the loss `dpo`."""
    exchange_ids: list[str] = field(default_factory=list)
    """Ids of the exchanges (recorded requests and answers) that the step learns from, each once."""
    groups: list[GroupPlan] = field(default_factory=list)
    """What the step does with each submitted rollout. Empty for supervised fine-tuning."""


def plan_step(groups: list[ResolvedGroup], config: TrainConfig, *, step: int, has_sft: bool = False) -> StepPlan:
    """Choose advantages, weights and samples of a reinforcement-learning step that starts from checkpoint `step`.

    `has_sft` says that the step learns supervised data too, so it trains even if no group can be learnt from.

    Raises:
        ConfigError: the schedule of the learning rate has ended.
        TrajectoryError: rewards are not finite, or `config` cannot use them.
        NothingTrainableError: there is no trajectory, or there are answers and none of them is a recorded one of this
            model.
    """
    config.rate_at(step)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        raise NothingTrainableError(
            f"nothing to train on: `groups` has {len(groups)} groups and no trajectory; send at least one trajectory, "
            "or leave this step out"
        )
    compares_pairs = any(isinstance(term, DpoConfig) for term in config.terms)
    selection = _select_pairs(groups, config) if compares_pairs else _select(groups, config)
    idle_factor = _idle_factor(groups, selection, config)
    by_group = [_group_samples(group, selection.advantages, config, idle_factor) for group in selection.trained]
    samples = list(itertools.chain(*by_group))
    if (untracked := _describe_untracked(trajectories)) is not None:
        raise NothingTrainableError(untracked)
    observations = list(_observations(groups, config))

    findings = _describe_left_out(selection, trajectories)
    if not samples and not observations and not has_sft:
        findings.insert(0, _describe_nothing(selection, trajectories, len(groups)))
    if config.observation_weight and not observations:
        findings.append(
            "`observation_weight` is set, but no rollout has a message of the environment between two answers whose "
            "tokens continue one another: there was no observation to learn"
        )
    earlier: set[frozenset[str]] = set()
    twins = []  # trajectories all of whose answers are those of an earlier one; forks share only some of them
    for trajectory in trajectories:
        answers = frozenset(answer.exchange_id for answer in trajectory.answers())
        twins += [trajectory.label] if answers in earlier else []
        earlier |= {answers} if answers else set()
    if twins:
        findings.append(
            f"{_names(twins)}: the same recorded answers as an earlier trajectory of this step, so each counts as "
            "often as it was given. Submit each rollout once, in one group"
        )

    dropped: Counter[str] = Counter()
    for trajectory in trajectories:
        if (reason := selection.dropped.get(trajectory.label)) is not None:
            dropped[reason] += trajectory.sampled_tokens
    trainable = sum(
        len(made) > 0 and (selection.learner != "the KL term" or group.label not in selection.left_out)
        for group, made in zip(selection.trained, by_group, strict=True)
    )
    return StepPlan(
        samples=samples,
        observations=observations,
        ledger=open_ledger(trajectories, samples, observations, dropped),
        metrics={
            "data/step_num_groups_submitted": len(groups),
            "data/step_num_groups_trainable": trainable,
            **({"data/step_num_trajectories_repeated": len(twins)} if twins else {}),
            **describe_step(trajectories, samples, config, step=step, num_pairs=len(selection.pairs)),
        },
        findings=findings,
        pairs=selection.pairs,
        exchange_ids=sorted(
            {answer.exchange_id for group in selection.trained for t in group.trajectories for answer in t.answers()}
            | {answer.exchange_id for sample in observations for answer in sample.answers}
        ),
        groups=_describe_groups(
            groups, samples, selection, has_advantages=not compares_pairs and config.learns_from_rewards
        ),
    )


# -- selection --


@dataclass(slots=True)
class _Selection:
    """The rollouts that a step trains, and why it leaves out the others."""

    trained: list[ResolvedGroup] = field(default_factory=list)
    """Groups with only the rollouts that the step learns from."""
    advantages: dict[str, RolloutAdvantages] = field(default_factory=dict)
    """Advantages of a rollout, by its label."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    left_out: dict[str, _GroupReason] = field(default_factory=dict)
    """Why a group teaches nothing by its rewards, by its label."""
    truncated: list[str] = field(default_factory=list)
    """Labels of rollouts that `mask_truncated` leaves out of groups that are trained."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Why a rollout with sampled tokens is left out, by its label."""
    learner: Literal["distillation", "the KL term"] | None = None
    """What learns from a group without spread."""

    def drop(self, trajectories: Sequence[ResolvedTrajectory], reason: str) -> None:
        self.dropped |= {trajectory.label: reason for trajectory in trajectories if trajectory.sampled_tokens}

    def unmasked(self, group: ResolvedGroup, config: TrainConfig) -> list[ResolvedTrajectory]:
        """Return the rollouts of a group without the truncated ones if these are masked, which are dropped."""
        masked = [trajectory for trajectory in group.trajectories if _is_masked(trajectory, config)]
        self.drop(masked, "truncated")
        self.truncated += [trajectory.label for trajectory in masked]
        return [trajectory for trajectory in group.trajectories if not _is_masked(trajectory, config)]

    def leave_out(self, group: ResolvedGroup, compared: Sequence[ResolvedTrajectory]) -> None:
        """Note that the trajectories `compared` of a group have no spread of rewards."""
        if len(compared) == 1:
            self.left_out[group.label] = "single_rollout"
        elif compared:
            has_reward = any(trajectory.has_reward for trajectory in compared)
            self.left_out[group.label] = "equal_rewards" if has_reward else "no_rewards"


def _select(groups: list[ResolvedGroup], config: TrainConfig) -> _Selection:
    """Choose groups whose rewards differ. Distillation learns from all rollouts; alone it ignores rewards.

    A KL term in the loss learns from groups without spread too, in a step in which another group has spread.
    """
    selection = _Selection()
    by_group: list[GroupAdvantages | None] = [None] * len(groups)
    if config.learns_from_rewards:
        by_group = [*compute_advantages([group.trajectories for group in groups], config)]
        if teacher_name(config) is not None:
            selection.learner = "distillation"
        elif config.learns_without_spread and any(advantages and advantages.has_spread for advantages in by_group):
            selection.learner = "the KL term"
    for group, advantages in zip(groups, by_group, strict=True):
        if advantages is None:
            check_finite(group.trajectories)
        elif not advantages.has_spread:
            selection.leave_out(group, group.trajectories)
            if selection.learner is None:
                selection.drop(group.trajectories, "no_reward_spread")
                continue
        # Rewards that differ within the tolerance only must not become advantages of any size.
        known = advantages.rollouts if advantages is not None and advantages.has_spread else None
        rollouts = known or [RolloutAdvantages()] * len(group.trajectories)
        selection.trained.append(ResolvedGroup(group.index, selection.unmasked(group, config)))
        selection.advantages |= {t.label: own for t, own in zip(group.trajectories, rollouts, strict=True)}
    return selection


def _select_pairs(groups: list[ResolvedGroup], config: TrainConfig) -> _Selection:
    """Choose the best and the worst rollout of each group."""
    selection = _Selection()
    for group in groups:
        able = [trajectory for trajectory in selection.unmasked(group, config) if trajectory.sampled_tokens > 0]
        pair = preference_pair(able)
        if pair is None:
            selection.leave_out(group, able)
            selection.drop(able, "no_reward_spread")
            continue
        selection.pairs.append((able[pair[0]].label, able[pair[1]].label))
        # What each rollout is worth depends on the policy's log-probs, so the trainer computes it.
        compared = [able[index] for index in sorted(pair)]
        selection.trained.append(ResolvedGroup(group.index, compared))
        selection.advantages |= {trajectory.label: RolloutAdvantages() for trajectory in compared}
        selection.drop([t for i, t in enumerate(able) if i not in pair], "no_preference_pair")
    return selection


def _is_masked(trajectory: ResolvedTrajectory, config: TrainConfig) -> bool:
    return config.mask_truncated and trajectory.is_truncated


# -- samples --


def _idle_factor(groups: list[ResolvedGroup], selection: _Selection, config: TrainConfig) -> float:
    """Return by how much rollouts that add nothing to the loss increase its divisor: at least 1.

    The factor goes to every sample's share, so each mini-batch counts its part of those rollouts.
    """
    trained = [group.trajectories for group in selection.trained]
    if selection.pairs or not _count(trained, config):
        return 1.0
    return _count([group.trajectories for group in groups], config) / _count(trained, config)


def _count(groups: list[list[ResolvedTrajectory]], config: TrainConfig) -> int:
    """Count what `normalize` makes equal: tokens, rollouts or groups. What the model did not sample does not count.

    Masked truncated rollouts count as rollouts, and their tokens do not count, as in TRL.
    """
    sampled = [[trajectory for trajectory in group if trajectory.sampled_tokens > 0] for group in groups]
    if config.normalize == "group":
        return sum(len(group) > 0 for group in sampled)
    rollouts = list(itertools.chain(*sampled))
    if config.normalize == "token":
        return sum(trajectory.sampled_tokens for trajectory in rollouts if not _is_masked(trajectory, config))
    return len(rollouts)


def _group_samples(
    group: ResolvedGroup, advantages: Mapping[str, RolloutAdvantages], config: TrainConfig, idle_factor: float
) -> list[PlannedSample]:
    group_tokens = sum(trajectory.sampled_tokens for trajectory in group.trajectories)
    samples = []
    for trajectory in group.trajectories:
        for p, path in enumerate(trajectory.paths):
            if path.sampled_tokens == 0:
                continue  # the model answered with nothing at all
            weight, share = _weigh(path, trajectory, group_tokens, config)
            if idle_factor > 1:
                share = idle_factor * (weight * path.sampled_tokens if share is None else share)
            samples.append(
                PlannedSample(
                    sample_id=f"{trajectory.label}.paths[{p}]",
                    rollout_id=trajectory.label,
                    answers=[
                        PlannedAnswer(
                            exchange_id=answer.exchange_id,
                            num_tokens=answer.num_tokens,
                            advantages=advantages[trajectory.label].of_choice(answer.choice),
                        )
                        for answer in path.answers
                    ],
                    weight=weight,
                    share=share,
                    policy_version=min(answer.policy_version for answer in path.answers),
                    group_id=group.label,
                )
            )
    return samples


def _observations(groups: list[ResolvedGroup], config: TrainConfig) -> Iterator[PlannedSample]:
    """Make the samples that learn what the environment answered: in all rollouts, whatever their rewards."""
    if not config.observation_weight:
        return
    for group in groups:
        for trajectory in group.trajectories:
            for p, path in enumerate(trajectory.paths):
                answers = [answer for answer in path.answers if answer.num_observed > 0]
                if not answers or _is_masked(trajectory, config):
                    continue
                yield PlannedSample(
                    sample_id=f"{trajectory.label}.paths[{p}].observations",
                    rollout_id=trajectory.label,
                    answers=[PlannedAnswer(exchange_id=answers[-1].exchange_id, num_tokens=0, advantages=[])],
                    weight=config.observation_weight,
                    share=float(sum(answer.num_observed for answer in answers)),
                    policy_version=min(answer.policy_version for answer in answers),
                    group_id=group.label,
                    observed=[(answer.start - answer.num_observed, answer.start) for answer in answers],
                )


def _weigh(
    path: ResolvedPath, trajectory: ResolvedTrajectory, group_tokens: int, config: TrainConfig
) -> tuple[float, float | None]:
    """(weight of each token of the path, what the path adds to the normaliser).

    The trainer computes sum(weight * loss) / sum(share), where a share of `None` is weight times tokens. So a weight
    of 1 / n over the n tokens of a rollout, its branches together, gives the mean of the rollouts' means.
    """
    match config.normalize:
        case "token":
            return 1.0, None
        case "rollout":
            return 1 / trajectory.sampled_tokens, None
        case "group":
            return 1 / group_tokens, None
        case divisor:
            return 1.0, divisor * path.sampled_tokens / trajectory.sampled_tokens


# -- findings, and the plan of each rollout --


def _describe_left_out(selection: _Selection, trajectories: Sequence[ResolvedTrajectory]) -> list[str]:
    """Make one finding for each reason for which groups or trajectories teach nothing, with their names."""
    learner = selection.learner
    consequence = "nothing to learn" if learner is None else f"only {learner} learns from it"
    labels: dict[str, list[str]] = {}
    for label, reason in selection.left_out.items():
        labels.setdefault(reason, []).append(label)
    silent = [trajectory.label for trajectory in trajectories if trajectory.sampled_tokens == 0]
    reasons = (
        (labels.get("equal_rewards"), f"all rewards are equal, {consequence}"),
        (labels.get("no_rewards"), f"no trajectory was ever given a reward, {consequence}"),
        (labels.get("single_rollout"), f"a single trajectory has no other to be compared with, {consequence}"),
        (selection.truncated, "the token limit cut off an answer, and `mask_truncated` leaves such rollouts out"),
        (silent, "no tokens that this model sampled, so there is nothing of it to train"),
    )
    return [f"{_names(names)}: {text}" for names, text in reasons if names]


def _describe_nothing(selection: _Selection, trajectories: Sequence[ResolvedTrajectory], num_groups: int) -> str:
    """Explain why a step trains nothing although its trajectories are valid."""
    sampled = [trajectory for trajectory in trajectories if trajectory.sampled_tokens]
    counts = Counter(selection.left_out.values())
    if not sampled:
        return (
            f"none of the {len(trajectories)} trajectories holds an answer of this model: the rollouts ended before "
            f"it said anything, {_NO_STEP}. Read one of them"
        )
    if len(selection.truncated) == len(sampled):
        return (
            f"the token limit cut off an answer in each of the {len(trajectories)} trajectories, and `mask_truncated` "
            f"leaves such rollouts out, {_NO_STEP}. Raise `max_completion_tokens`, or set `mask_truncated=False`"
        )
    if counts["no_rewards"] == num_groups:
        return (
            f"none of the {len(trajectories)} trajectories was ever given a reward: all count as 0, {_NO_STEP}. Set "
            "`trajectory.reward` in the rollout, or score the groups before they are trained"
        )
    if counts["single_rollout"] == num_groups:
        return (
            f"every group ({num_groups}) holds a single trajectory: a reward counts in comparison with other rollouts "
            f"of the same group, {_NO_STEP}. Put several rollouts of a scenario into each group, as "
            "`art.TrajectoryGroup(rollout(model, scenario) for _ in range(8))` does"
        )
    if counts["equal_rewards"] == num_groups:
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


def _describe_untracked(trajectories: Sequence[ResolvedTrajectory]) -> str | None:
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


def _names(labels: list[str]) -> str:
    more = len(labels) - _MAX_NAMES
    return ", ".join(labels[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _describe_groups(
    groups: Sequence[ResolvedGroup], samples: Sequence[PlannedSample], selection: _Selection, *, has_advantages: bool
) -> list[GroupPlan]:
    """Describe the groups of a request and their rollouts, in their order.

    Args:
        has_advantages: whether the plan computes advantages. Preference losses and distillation have none.
    """
    by_rollout: dict[str, list[PlannedAnswer]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout_id, []).extend(answer for answer in sample.answers if answer.num_tokens)
    described = []
    for group in groups:
        reason = selection.left_out.get(group.label)
        rollouts = []
        for trajectory in group.trajectories:
            answers, dropped = by_rollout.get(trajectory.label, []), selection.dropped.get(trajectory.label)
            advantage = None
            if has_advantages and reason is None and answers:
                advantage = float(np.concatenate([answer.token_advantages() for answer in answers]).mean())
            rollouts.append(
                RolloutPlan(
                    index=trajectory.index,
                    label=trajectory.label,
                    reward=trajectory.reward if trajectory.has_reward else None,
                    advantage=advantage,
                    exchange_ids=[[answer.exchange_id for answer in path.answers] for path in trajectory.paths],
                    context_tokens=trajectory.context_tokens,
                    trained_tokens=sum(answer.num_tokens for answer in answers),
                    dropped_tokens={} if dropped is None else {dropped: trajectory.sampled_tokens},
                    untracked_choices=trajectory.untracked_choices,
                )
            )
        described.append(GroupPlan(index=group.index, left_out=reason, rollouts=rollouts))
    return described
