"""Decide what a reinforcement-learning step trains, and account for what it does not.

ResolvedGroup[] --select (advantages, or preference pairs)--> --weigh--> StepPlan (samples, pairs, ledger)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from art.config import DpoConfig, TrainConfig
from art.credit.advantages import RolloutAdvantages, compute_advantages, preference_pairs
from art.credit.distributions import describe_step
from art.credit.ledger import open_ledger
from art.credit.plan_findings import LeftOut, describe_left_out, describe_nothing, describe_untracked
from art.credit.references import teacher_name
from art.credit.resolve import ResolvedGroup, ResolvedTrajectory, TokenPath
from art.credit.samples import PlannedAnswer, PlannedSample
from art.errors import NothingTrainableError


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The samples of one training step, its metrics, and the account of the sampled tokens that it leaves out."""

    samples: list[PlannedSample] = field(default_factory=list)
    """Empty if there is nothing to learn; then the first of `findings` says why."""
    ledger: dict[str, float] = field(default_factory=dict)
    """Number of sampled tokens that are trained, context or dropped (`ledger.py`); empty for supervised fine-tuning."""
    metrics: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    """What a person should know, in plain words, e.g. which groups were left out."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Preference pairs of rollout ids, (chosen, rejected), for the loss `dpo`."""
    exchange_ids: list[str] = field(default_factory=list)
    """Ids of the exchanges (recorded requests and answers) of all trained rollouts, each once."""


def plan_step(groups: list[ResolvedGroup], config: TrainConfig, *, step: int) -> StepPlan:
    """Choose advantages, weights and samples of a reinforcement-learning step that starts from checkpoint `step`.

    Raises:
        TrajectoryError: rewards are not finite, or `config` cannot use them.
        NothingTrainableError: there are answers, and none of them is a recorded one of this model.
    """
    dpo = next((term for term in config.terms if isinstance(term, DpoConfig)), None)
    selection = _select(groups, config) if dpo is None else _select_pairs(groups, config, dpo)
    by_group = [_group_samples(group, config) for group in selection.trained]
    samples = list(itertools.chain(*by_group))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if (untracked := describe_untracked(trajectories)) is not None:
        raise NothingTrainableError(untracked)
    findings = describe_left_out(selection.left_out, trajectories, only_distilled=teacher_name(config) is not None)
    if not samples:
        findings.insert(0, describe_nothing(selection.left_out, trajectories, len(groups)))
    return StepPlan(
        samples=samples,
        ledger=open_ledger(trajectories, samples, selection.dropped),
        metrics={
            "data/step_num_groups_submitted": len(groups),
            "data/step_num_groups_trainable": sum(len(group) > 0 for group in by_group),
            **describe_step(trajectories, samples, config, step=step, num_pairs=len(selection.pairs)),
        },
        findings=findings,
        pairs=selection.pairs,
        exchange_ids=sorted(
            {answer.exchange_id for group in selection.trained for t, _ in group for answer in t.answers()}
        ),
    )


# -- selection --


@dataclass(slots=True)
class _Selection:
    trained: list[list[tuple[ResolvedTrajectory, RolloutAdvantages]]] = field(default_factory=list)
    """Each group's rollouts that the step learns from."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped tokens for each reason."""

    def drop(self, trajectories: Sequence[ResolvedTrajectory], reason: str) -> None:
        tokens = sum(trajectory.sampled_tokens for trajectory in trajectories)
        if tokens:
            self.dropped[reason] += tokens


def _select(groups: list[ResolvedGroup], config: TrainConfig) -> _Selection:
    """Choose groups whose rewards differ. Distillation learns from all rollouts; alone it ignores rewards."""
    selection = _Selection()
    if not config.learns_from_rewards:
        selection.trained = [
            [(trajectory, RolloutAdvantages()) for trajectory in group.trajectories] for group in groups
        ]
        return selection
    by_group = compute_advantages([[t.rewards() for t in group.trajectories] for group in groups], config)
    for group, advantages in zip(groups, by_group, strict=True):
        if not advantages.has_spread:
            selection.left_out.note(group.label, group.trajectories)
        if advantages.has_spread or teacher_name(config) is not None:
            selection.trained.append(list(zip(group.trajectories, advantages.rollouts, strict=True)))
        else:
            selection.drop(group.trajectories, "no_reward_spread")
    return selection


def _select_pairs(groups: list[ResolvedGroup], config: TrainConfig, dpo: DpoConfig) -> _Selection:
    """Choose rollouts that are better or worse than another of their group."""
    selection = _Selection()
    for group in groups:
        able = [trajectory for trajectory in group.trajectories if trajectory.sampled_tokens > 0]
        pairs = preference_pairs([trajectory.rewards() for trajectory in able], config, kind=dpo.pairs)
        selection.pairs += [(able[chosen].label, able[rejected].label) for chosen, rejected in pairs]
        if not pairs:
            selection.left_out.note(group.label, able)
            selection.drop(able, "no_reward_spread")
            continue
        paired = {index for pair in pairs for index in pair}
        # What each rollout is worth depends on the policy's log-probs, so the trainer computes it.
        selection.trained.append([(able[index], RolloutAdvantages()) for index in sorted(paired)])
        selection.drop([t for i, t in enumerate(able) if i not in paired], "no_preference_pair")
    return selection


# -- samples --


def _group_samples(
    group: list[tuple[ResolvedTrajectory, RolloutAdvantages]], config: TrainConfig
) -> list[PlannedSample]:
    group_tokens = sum(trajectory.sampled_tokens for trajectory, _ in group)
    samples = []
    for trajectory, advantages in group:
        for p, path in enumerate(trajectory.paths):
            if path.sampled_tokens == 0:
                continue  # the model answered with nothing at all
            weight, share = _weigh(path, trajectory, group_tokens, config)
            samples.append(
                PlannedSample(
                    sample_id=f"{trajectory.label}.paths[{p}]",
                    rollout_id=trajectory.label,
                    answers=[
                        PlannedAnswer(
                            exchange_id=answer.exchange_id,
                            num_tokens=answer.num_tokens,
                            advantages=advantages.of_choice(answer.choice),
                        )
                        for answer in path.answers
                    ],
                    weight=weight,
                    share=share,
                    policy_version=min(answer.policy_version for answer in path.answers),
                )
            )
    return samples


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
