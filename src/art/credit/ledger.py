"""The numbers of a planned step: the account of every token that was sampled for the submitted trajectories, the spread
of rewards and advantages, and how many answers were cut off.

    sampled = trained + context + dropped(by reason)

Context tokens were sampled by another model: the policy saw them and does not learn them. Tokens that the environment
produced were not sampled; those that are learnt (`observation_weight`) are counted beside the sum, as `observed`. The
ledger is a dict of metrics, `ledger/...`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from art.config import TrainConfig
from art.credit.resolve import ResolvedTrajectory
from art.credit.samples import PlannedSample
from art.errors import TrainingError
from art.metrics.catalogue import describe
from art.protocol.samples import COMPONENTS

SAMPLER_MISMATCH = "sampler_mismatch"
"""Reason: the trainer does not reproduce the log-probs."""
_OBSERVED = "ledger/observed_tokens"
CONSTRAINT_MISMATCH = "constraint_mismatch"
"""Reason: a token of the sample could not be drawn under the recorded grammar or kept tokens."""


def open_ledger(
    trajectories: Sequence[ResolvedTrajectory],
    samples: Sequence[PlannedSample],
    observations: Sequence[PlannedSample],
    dropped: Counter[str],
) -> dict[str, float]:
    """Make the ledger of a planned step, as metrics. `dropped` counts tokens by reason."""
    trained = sum(answer.num_tokens for sample in samples for answer in sample.answers)
    own = sum(trajectory.sampled_tokens for trajectory in trajectories)
    context = sum(trajectory.context_tokens for trajectory in trajectories)
    ledger: dict[str, float] = {
        "ledger/sampled_tokens": own + context,
        "ledger/trained_tokens": trained,
        "ledger/context_tokens": context,
        "ledger/untracked_choices": sum(trajectory.untracked_choices for trajectory in trajectories),
        **{f"ledger/dropped_tokens/{reason}": count for reason, count in dropped.items()},
    }
    if spans := [span for sample in observations for span in sample.observed or ()]:
        ledger[_OBSERVED] = float(sum(end - start for start, end in spans))
    assert own == trained + dropped.total(), f"the ledger does not close: {ledger}"
    return ledger


def close_unused_ledger(ledger: dict[str, float], reason: str) -> dict[str, float]:
    """Return the ledger of a step whose planned tokens the trainer all refused: they are dropped, by `reason`."""
    dropped = f"ledger/dropped_tokens/{reason}"
    refused = ledger["ledger/trained_tokens"] + ledger.get(dropped, 0.0)
    return ledger | {"ledger/trained_tokens": 0.0, dropped: refused}


def close_ledger(ledger: dict[str, float], trained: dict[str, float]) -> dict[str, float]:
    """Add the tokens that the trainer itself left out, and check the ledger against the trainer's own count.

    Args:
        ledger: the ledger of the plan.
        trained: metrics of the step.

    Raises:
        TrainingError: plan and trainer count different numbers of tokens.
    """
    planned, counted = ledger["ledger/trained_tokens"], trained["data/step_trainable_tokens"]
    supervised = {name: trained.get(f"data/step_{name}_tokens", 0.0) for name in COMPONENTS if name != "rl"}
    counted -= sum(supervised.values())  # not sampled
    left_out = {
        SAMPLER_MISMATCH: trained.get("offpolicy/mismatch_masked_tokens", 0.0),
        CONSTRAINT_MISMATCH: trained.get("offpolicy/constraint_refused_tokens", 0.0),
    }
    if planned != counted + left_out[CONSTRAINT_MISMATCH]:  # refused samples do not reach the updates that count
        raise TrainingError(f"the ledger does not close: {planned:.0f} tokens were planned, {counted:.0f} were trained")
    if (observed := ledger.get(_OBSERVED, 0.0)) != supervised["observation"]:
        raise TrainingError(
            f"the ledger does not close: {observed:.0f} tokens of observations were planned, "
            f"{supervised['observation']:.0f} were trained"
        )
    return ledger | {
        "ledger/trained_tokens": planned - sum(left_out.values()),
        **{f"ledger/dropped_tokens/{reason}": count for reason, count in left_out.items() if count},
    }


def describe_step(
    trajectories: Sequence[ResolvedTrajectory],
    samples: Sequence[PlannedSample],
    config: TrainConfig,
    *,
    step: int,
    num_pairs: int,
) -> dict[str, float]:
    """Describe the submitted trajectories, and the samples and preference pairs trained at `step`, as metrics."""
    metrics: dict[str, float] = {"data/step_num_trajectories": len(trajectories)}
    if samples:
        metrics["offpolicy/max_staleness"] = step - min(sample.policy_version for sample in samples)
    metrics |= describe_rollouts(trajectories)
    if num_pairs:
        metrics["data/step_num_pairs"] = num_pairs
    elif samples and config.learns_from_rewards:
        by_rollout: dict[str, list[float]] = defaultdict(list)  # each counts with the mean of its tokens
        for sample in samples:
            for answer in sample.answers:
                by_rollout[sample.rollout_id] += answer.token_advantages().tolist()
        metrics |= describe("data/advantage", [math.fsum(values) / len(values) for values in by_rollout.values()])
    return metrics


def describe_rollouts(trajectories: Sequence[ResolvedTrajectory]) -> dict[str, float]:
    """Describe all submitted rollouts (at least one): rewards, lengths, shares that were cut off or malformed."""
    rollouts = [list(trajectory.answers()) for trajectory in trajectories]
    truncated = sum(trajectory.is_truncated for trajectory in trajectories)
    malformed = sum(
        trajectory.policy_fault or any(answer.is_malformed for answer in answers)
        for trajectory, answers in zip(trajectories, rollouts, strict=True)
    )
    return {
        "data/step_truncated_share": truncated / len(trajectories),
        "data/step_malformed_share": malformed / len(trajectories),
        "data/step_answers_per_rollout": sum(map(len, rollouts)) / len(trajectories),
        "data/step_tokens_per_rollout": sum(t.sampled_tokens for t in trajectories) / len(trajectories),
        **describe("data/reward", [trajectory.reward for trajectory in trajectories]),
    }
