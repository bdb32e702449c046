"""Decide what a reinforcement-learning step trains, and account for what it does not.

ResolvedGroup[] --select (advantages, or preference pairs)--> --weigh--> StepPlan (samples, pairs, ledger)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from art.config import DpoConfig, TrainConfig
from art.credit.advantages import RolloutAdvantages, check_finite, compute_advantages, preference_pairs
from art.credit.ledger import describe_step, observed_tokens, open_ledger
from art.credit.plan_findings import (
    NO_OBSERVATIONS,
    LeftOut,
    describe_groups,
    describe_left_out,
    describe_nothing,
    describe_twins,
    describe_untracked,
)
from art.credit.references import teacher_name
from art.credit.resolve import ResolvedGroup, ResolvedTrajectory, TokenPath
from art.credit.samples import PlannedAnswer, PlannedSample
from art.errors import NothingTrainableError
from art.storage.steps.plan_record import GroupPlan


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
    dpo = next((term for term in config.terms if isinstance(term, DpoConfig)), None)
    selection = _select(groups, config) if dpo is None else _select_pairs(groups, config, dpo)
    idle_factor = _idle_factor(groups, selection, config)
    by_group = [_group_samples(group, selection.advantages, config, idle_factor) for group in selection.trained]
    samples = list(itertools.chain(*by_group))
    if (untracked := describe_untracked(trajectories)) is not None:
        raise NothingTrainableError(untracked)
    observations = list(_observations(groups, config))
    findings = describe_left_out(selection.left_out, trajectories, selection.learner)
    if not samples and not observations and not has_sft:
        findings.insert(0, describe_nothing(selection.left_out, trajectories, len(groups)))
    if config.observation_weight and not observations:
        findings.append(NO_OBSERVATIONS)
    twins = _twins(trajectories)
    findings += [describe_twins(twins)] if twins else []
    return StepPlan(
        samples=samples,
        observations=observations,
        ledger=open_ledger(trajectories, samples, _count_dropped(trajectories, selection))
        | observed_tokens(observations),
        metrics={
            "data/step_num_groups_submitted": len(groups),
            "data/step_num_groups_trainable": sum(
                len(made) > 0 and selection.has_signal(group)
                for group, made in zip(selection.trained, by_group, strict=True)
            ),
            **({"data/step_num_trajectories_repeated": len(twins)} if twins else {}),
            **describe_step(trajectories, samples, config, step=step, num_pairs=len(selection.pairs)),
        },
        findings=findings,
        pairs=selection.pairs,
        exchange_ids=sorted(
            {answer.exchange_id for group in selection.trained for t in group.trajectories for answer in t.answers()}
            | {answer.exchange_id for sample in observations for answer in sample.answers}
        ),
        groups=describe_groups(
            groups,
            samples,
            selection.dropped,
            selection.left_out,
            has_advantages=dpo is None and config.learns_from_rewards,
        ),
    )


def _twins(trajectories: Sequence[ResolvedTrajectory]) -> list[str]:
    """Name the trajectories all of whose answers are those of an earlier one; forks share only some of them."""
    earlier: set[frozenset[str]] = set()
    labels = []
    for trajectory in trajectories:
        answers = frozenset(answer.exchange_id for answer in trajectory.answers())
        labels += [trajectory.label] if answers in earlier else []
        earlier |= {answers} if answers else set()
    return labels


# -- selection --


@dataclass(slots=True)
class _Selection:
    trained: list[ResolvedGroup] = field(default_factory=list)
    """Groups with only the rollouts that the step learns from."""
    advantages: dict[str, RolloutAdvantages] = field(default_factory=dict)
    """Advantages of a rollout, by its label."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    dropped: dict[str, str] = field(default_factory=dict)
    """Why a rollout is left out, by its label."""
    learner: Literal["distillation", "the KL term"] | None = None
    """What learns from a group without spread."""

    def train(self, group: ResolvedGroup, advantages: Sequence[RolloutAdvantages], config: TrainConfig) -> None:
        """Add a group to the trained ones, without its truncated rollouts if they are masked."""
        masked = [trajectory for trajectory in group.trajectories if _is_masked(trajectory, config)]
        self.drop(masked, "truncated")
        self.left_out.truncated += [trajectory.label for trajectory in masked]
        kept = [trajectory for trajectory in group.trajectories if not _is_masked(trajectory, config)]
        self.trained.append(ResolvedGroup(group.index, kept))
        self.advantages |= {t.label: own for t, own in zip(group.trajectories, advantages, strict=True)}

    def has_signal(self, group: ResolvedGroup) -> bool:
        """Whether more than a KL term learns from a trained group."""
        return self.learner != "the KL term" or self.left_out.reason(group.label) is None

    def drop(self, trajectories: Sequence[ResolvedTrajectory], reason: str) -> None:
        self.dropped |= {trajectory.label: reason for trajectory in trajectories if trajectory.sampled_tokens}


def _select(groups: list[ResolvedGroup], config: TrainConfig) -> _Selection:
    """Choose groups whose rewards differ. Distillation learns from all rollouts; alone it ignores rewards.

    A KL term in the loss learns from groups without spread too, in a step in which another group has spread.
    """
    selection = _Selection()
    if not config.learns_from_rewards:
        for group in groups:
            check_finite([trajectory.rewards() for trajectory in group.trajectories])
            selection.train(group, [RolloutAdvantages()] * len(group.trajectories), config)
        return selection
    by_group = compute_advantages([[t.rewards() for t in group.trajectories] for group in groups], config)
    if teacher_name(config) is not None:
        selection.learner = "distillation"
    elif config.learns_without_spread and any(advantages.has_spread for advantages in by_group):
        selection.learner = "the KL term"
    for group, advantages in zip(groups, by_group, strict=True):
        if not advantages.has_spread:
            selection.left_out.note(group.label, group.trajectories)
        if advantages.has_spread or selection.learner is not None:
            # Rewards that differ within the tolerance only must not become advantages of any size.
            rollouts = advantages.rollouts if advantages.has_spread else [RolloutAdvantages()] * len(group.trajectories)
            selection.train(group, rollouts, config)
        else:
            selection.drop(group.trajectories, "no_reward_spread")
    return selection


def _select_pairs(groups: list[ResolvedGroup], config: TrainConfig, dpo: DpoConfig) -> _Selection:
    """Choose rollouts that are better or worse than another of their group."""
    selection = _Selection()
    for group in groups:
        masked = [trajectory for trajectory in group.trajectories if _is_masked(trajectory, config)]
        selection.drop(masked, "truncated")
        selection.left_out.truncated += [trajectory.label for trajectory in masked]
        able = [t for t in group.trajectories if t.sampled_tokens > 0 and not _is_masked(t, config)]
        pairs = preference_pairs([trajectory.rewards() for trajectory in able], kind=dpo.pairs)
        selection.pairs += [(able[chosen].label, able[rejected].label) for chosen, rejected in pairs]
        if not pairs:
            selection.left_out.note(group.label, able)
            selection.drop(able, "no_reward_spread")
            continue
        paired = {index for pair in pairs for index in pair}
        # What each rollout is worth depends on the policy's log-probs, so the trainer computes it.
        compared = [able[index] for index in sorted(paired)]
        selection.trained.append(ResolvedGroup(group.index, compared))
        selection.advantages |= {trajectory.label: RolloutAdvantages() for trajectory in compared}
        selection.drop([t for i, t in enumerate(able) if i not in paired], "no_preference_pair")
    return selection


def _count_dropped(trajectories: Sequence[ResolvedTrajectory], selection: _Selection) -> Counter[str]:
    """Count the tokens of the rollouts that are left out, by reason."""
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        if (reason := selection.dropped.get(trajectory.label)) is not None:
            counts[reason] += trajectory.sampled_tokens
    return counts


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
    path: TokenPath, trajectory: ResolvedTrajectory, group_tokens: int, config: TrainConfig
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
        case "constant":
            assert config.constant_tokens is not None  # the config's validator demands it
            return 1.0, config.constant_tokens * path.sampled_tokens / trajectory.sampled_tokens
