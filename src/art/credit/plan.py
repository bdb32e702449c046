"""What a reinforcement-learning step trains, and the account of what it does not.

    ResolvedGroup[] --select (advantages, or preference pairs)--> --weigh--> StepPlan (samples, pairs, ledger)

The ledger closes over the tokens that the model sampled for the submitted trajectories:

    sampled = trained + context + dropped(by reason)

where *context* are tokens of the same trajectories that another model sampled: the policy saw them and does not learn
them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from art.config import DistillConfig, DpoConfig, TrainConfig
from art.credit.advantages import (
    RolloutAdvantages,
    compute_advantages,
    overlong_punishment,
    preference_pairs,
)
from art.credit.distributions import describe_advantages, describe_rollouts
from art.credit.plan_findings import LeftOut, describe_left_out, describe_nothing, describe_untracked
from art.credit.resolve import Path, ResolvedGroup, ResolvedTrajectory
from art.errors import NothingTrainableError, TrainingError
from art.trainer.contract import TrainingSample


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What goes to the trainer, and the account of what does not."""

    samples: list[TrainingSample]
    """Empty if there is nothing to learn; then the first of `findings` says why."""
    ledger: dict[str, float]
    metrics: dict[str, float]
    findings: list[str] = field(default_factory=list)
    """What a person should know, in plain words, e.g. which groups were left out."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """(chosen, rejected) rollout ids, for the loss dpo."""
    exchange_ids: list[str] = field(default_factory=list)
    """The answers in `samples`."""


def plan_step(groups: list[ResolvedGroup], config: TrainConfig, *, step: int) -> StepPlan:
    """Advantages, weights and samples of one reinforcement-learning step that starts from checkpoint `step`.

    Raises:
        TrajectoryError: rewards that are not finite, or that `config` cannot use.
        NothingTrainableError: there are answers, and none of them is a recorded one of this model.
    """
    dpo = next((term for term in config.terms if isinstance(term, DpoConfig)), None)
    selection = _select(groups, config) if dpo is None else _select_pairs(groups, config, dpo)
    by_group = [_group_samples(group, config) for group in selection.trained]
    samples = list(itertools.chain(*by_group))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if (untracked := describe_untracked(trajectories)) is not None:
        raise NothingTrainableError(untracked)
    metrics: dict[str, float] = {
        "data/step_num_groups_submitted": len(groups),
        "data/step_num_groups_trainable": sum(len(group) > 0 for group in by_group),
        "data/step_num_trajectories": len(trajectories),
    }
    if samples:
        metrics["offpolicy/max_staleness"] = step - min(sample.policy_version for sample in samples)
    if config.overlong is not None:
        punished = [t for t in trajectories if overlong_punishment(t.sampled_tokens, config.overlong) > 0]
        metrics["data/step_num_trajectories_overlong"] = len(punished)
    metrics |= describe_rollouts(trajectories)
    if selection.pairs:
        metrics["data/step_num_pairs"] = len(selection.pairs)
    elif samples and config.learns_from_rewards:
        metrics |= describe_advantages(samples)
    findings = describe_left_out(selection.left_out, trajectories, only_distilled=_distills(config))
    if not samples:
        findings.insert(0, describe_nothing(selection.left_out, trajectories, len(groups)))
    return StepPlan(
        samples=samples,
        ledger=_open_ledger(trajectories, samples, selection.dropped),
        metrics=metrics,
        findings=findings,
        pairs=selection.pairs,
        exchange_ids=_exchange_ids(selection.trained),
    )


def _exchange_ids(trained: list[list[tuple[ResolvedTrajectory, RolloutAdvantages]]]) -> list[str]:
    return sorted(
        {
            answer.exchange.id
            for group in trained
            for trajectory, _ in group
            for path in trajectory.paths
            for answer in path.answers
        }
    )


def _open_ledger(
    trajectories: list[ResolvedTrajectory], samples: list[TrainingSample], dropped: Counter[str]
) -> dict[str, float]:
    trained = sum(sum(sample.loss_mask) for sample in samples)
    own = sum(trajectory.sampled_tokens for trajectory in trajectories)
    context = sum(trajectory.context_tokens for trajectory in trajectories)
    ledger: dict[str, float] = {
        "ledger/sampled_tokens": own + context,
        "ledger/trained_tokens": trained,
        "ledger/context_tokens": context,
        "ledger/untracked_choices": sum(trajectory.untracked_choices for trajectory in trajectories),
        **{f"ledger/dropped_tokens/{reason}": count for reason, count in dropped.items()},
    }
    assert own == trained + dropped.total(), f"the ledger does not close: {ledger}"
    return ledger


def close_unused_ledger(ledger: dict[str, float], reason: str) -> dict[str, float]:
    """The ledger of a step whose planned tokens the trainer refused as a whole."""
    dropped = f"ledger/dropped_tokens/{reason}"
    refused = ledger["ledger/trained_tokens"] + ledger.get(dropped, 0.0)
    return ledger | {"ledger/trained_tokens": 0.0, dropped: refused}


def close_ledger(ledger: dict[str, float], trained: dict[str, float]) -> dict[str, float]:
    """The ledger of a step with what the trainer itself left out, checked against the trainer's own count.

    Args:
        ledger: of the step's plan.
        trained: metrics of the step.

    Raises:
        TrainingError: plan and trainer count different numbers of tokens.
    """
    planned, counted = ledger["ledger/trained_tokens"], trained["data/step_trainable_tokens"]
    if planned != counted:
        raise TrainingError(f"the ledger does not close: {planned:.0f} tokens were planned, {counted:.0f} were trained")
    left_out = trained.get("offpolicy/mismatch_masked_tokens", 0.0)
    if left_out == 0:
        return ledger
    return ledger | {
        "ledger/trained_tokens": planned - left_out,
        "ledger/dropped_tokens/sampler_mismatch": left_out,
    }


# -- selection --


@dataclass(slots=True)
class _Selection:
    trained: list[list[tuple[ResolvedTrajectory, RolloutAdvantages]]] = field(default_factory=list)
    """By group."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    dropped: Counter[str] = field(default_factory=Counter)
    """Tokens by reason."""

    def drop(self, trajectories: Sequence[ResolvedTrajectory], reason: str) -> None:
        tokens = sum(trajectory.sampled_tokens for trajectory in trajectories)
        if tokens:
            self.dropped[reason] += tokens


def _select(groups: list[ResolvedGroup], config: TrainConfig) -> _Selection:
    """Groups whose rewards differ. Distillation learns from all trajectories, and alone it does not look at rewards."""
    selection = _Selection()
    if not config.learns_from_rewards:
        selection.trained = [
            [(trajectory, RolloutAdvantages()) for trajectory in group.trajectories] for group in groups
        ]
        return selection
    advantages = compute_advantages([[t.rewards() for t in group.trajectories] for group in groups], config)
    for group, found in zip(groups, advantages, strict=True):
        if not found.has_spread:
            selection.left_out.note(group.label, group.trajectories)
        if found.has_spread or _distills(config):
            selection.trained.append(list(zip(group.trajectories, found.rollouts, strict=True)))
        else:
            selection.drop(group.trajectories, "no_reward_spread")
    return selection


def _select_pairs(groups: list[ResolvedGroup], config: TrainConfig, dpo: DpoConfig) -> _Selection:
    """Rollouts that are better or worse than another of their group."""
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


def _distills(config: TrainConfig) -> bool:
    return any(isinstance(term, DistillConfig) for term in config.terms)


# -- samples --


def _group_samples(
    group: list[tuple[ResolvedTrajectory, RolloutAdvantages]], config: TrainConfig
) -> list[TrainingSample]:
    group_tokens = sum(trajectory.sampled_tokens for trajectory, _ in group)
    samples = []
    for trajectory, advantages in group:
        for p, path in enumerate(trajectory.paths):
            if path.sampled_tokens == 0:
                continue  # the model answered with nothing at all
            weight, share = _weigh(path, trajectory, group_tokens, config)
            samples.append(_sample(path, trajectory.label, p, advantages, weight, share))
    return samples


def _weigh(
    path: Path, trajectory: ResolvedTrajectory, group_tokens: int, config: TrainConfig
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
            assert config.constant_tokens is not None  # the config sees to that
            return 1.0, config.constant_tokens * path.sampled_tokens / trajectory.sampled_tokens


def _sample(
    path: Path, rollout_id: str, number: int, advantages: RolloutAdvantages, weight: float, share: float | None
) -> TrainingSample:
    size = len(path.token_ids)
    loss_mask, logprobs, credits = [False] * size, [0.0] * size, [0.0] * size
    for answer in path.answers:
        num_tokens = answer.end - answer.start
        loss_mask[answer.start : answer.end] = [True] * num_tokens
        logprobs[answer.start : answer.end] = answer.exchange.sampling_logprobs
        credits[answer.start : answer.end] = advantages.of_tokens(answer.choice, num_tokens)
    return TrainingSample(
        sample_id=f"{rollout_id}.paths[{number}]",
        rollout_id=rollout_id,
        token_ids=path.token_ids,
        loss_mask=loss_mask,
        sampling_logprobs=logprobs,
        advantages=credits,
        weight=weight,
        share=share,
        temperature=path.answers[0].exchange.temperature,
        policy_version=min(answer.exchange.policy_version for answer in path.answers),
    )
