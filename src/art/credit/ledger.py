"""The account of every token that was sampled for the submitted trajectories of a step:

    sampled = trained + context + dropped(by reason)

Context tokens were sampled by another model: the policy saw them and does not learn them. The ledger is a dict of
metrics, `ledger/...`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from art.credit.resolve import ResolvedTrajectory
from art.credit.samples import PlannedSample
from art.errors import TrainingError


def open_ledger(
    trajectories: Sequence[ResolvedTrajectory], samples: Sequence[PlannedSample], dropped: Counter[str]
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
    if planned != counted:
        raise TrainingError(f"the ledger does not close: {planned:.0f} tokens were planned, {counted:.0f} were trained")
    left_out = trained.get("offpolicy/mismatch_masked_tokens", 0.0)
    if left_out == 0:
        return ledger
    return ledger | {
        "ledger/trained_tokens": planned - left_out,
        "ledger/dropped_tokens/sampler_mismatch": left_out,
    }
