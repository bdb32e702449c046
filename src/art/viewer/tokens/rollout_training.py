"""What a training step did with a rollout: from the step's plan record and its token file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from art.errors import StorageError
from art.storage.layout import ModelPaths
from art.storage.steps.plan_record import GroupPlan, PlanRecord, RolloutPlan, read_plans
from art.storage.steps.token_file import RecordedSample, TokenFile, TokenReason

REASONS = {
    TokenReason.TRAINED: "trained",
    TokenReason.TRUNCATED: "trained with a truncated importance weight",
    TokenReason.CAPPED: "trained with a capped ratio",
    TokenReason.CLIPPED: "not learnt: beyond the bound of the loss",
    TokenReason.NO_ADVANTAGE: "not learnt: advantage 0",
    TokenReason.NO_GRADIENT: "not learnt: the loss gives it no gradient",
    TokenReason.FORCED: "not learnt: the only token that was allowed",
    TokenReason.MISMATCHED_ROLLOUT: "masked: off-policy rollout",
    TokenReason.MISMATCHED_TOKEN: "masked: off-policy token",
    TokenReason.UNPAIRED: "masked: its counterpart was left out",
    TokenReason.REFUSED: "masked: the recorded constraint does not allow it",
}
DROPPED = {
    "no_reward_spread": "dropped: no spread of rewards in the group",
    "no_preference_pair": "dropped: in no preference pair",
    "truncated": "dropped: cut off by the token limit",
    "sampler_mismatch": "masked: off-policy",
    "constraint_mismatch": "masked: the recorded constraint does not allow it",
}


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """The values of the targets of one sample, and their places on the path."""

    sample: RecordedSample
    places: NDArray[np.int64]  # [N]
    values: dict[str, NDArray[Any]]  # [N] each


@dataclass(slots=True, kw_only=True)
class RolloutTraining:
    """What one training job did with a rollout."""

    plan: PlanRecord
    group: GroupPlan
    rollout: RolloutPlan
    file: TokenFile | None
    """`None` where the step wrote no token file, or it has been deleted."""
    by_id: dict[str, int] = field(default_factory=dict)
    """Number in the file of each of the rollout's samples, by id."""

    def samples(self, exchange_ids: Sequence[str]) -> list[TrainedSample]:
        """Return the samples of the path of these exchanges: its answers, and what was learnt as observation."""
        if self.file is None or list(exchange_ids) not in self.rollout.exchange_ids:
            return []
        name = f"{self.rollout.label}.paths[{self.rollout.exchange_ids.index(list(exchange_ids))}]"
        numbers = [self.by_id[one] for one in (name, f"{name}.observations") if one in self.by_id]
        return [self._read(number) for number in numbers]

    def _read(self, number: int) -> TrainedSample:
        assert self.file is not None
        sample = self.file.samples[number]
        places = np.concatenate([np.arange(start, end) for start, end in sample.spans])
        values = self.file.read(number)
        if sample.is_refused:
            values = {"reasons": np.full(len(places), int(TokenReason.REFUSED), dtype=np.uint8)}
        return TrainedSample(sample, places, values)

    def why_dropped(self) -> str | None:
        """Return why the whole rollout was left out; `None` if it was trained."""
        reason = self.rollout.dropped_because
        return None if reason is None else DROPPED.get(reason, f"dropped: {reason.replace('_', ' ')}")


def find_training(paths: ModelPaths, step: int, exchange_ids: Sequence[str]) -> RolloutTraining | None:
    """Find the job that was given the rollout with these exchanges; `None` if none is recorded.

    Args:
        step: step under which the rollout was logged. Scripts log before or after they train, so the steps beside it
            are looked at too. A job that trained comes before one that did not.
    """
    named = set(exchange_ids)
    jobs = [
        one
        for number in (step, step + 1, step - 1)
        if number >= 0
        for plan in read_plans(paths.step(number))
        for one in _find(plan, named)
    ]
    jobs.sort(key=lambda one: not one[0].trained)
    return None if not jobs else open_training(paths, *jobs[0])


def open_training(paths: ModelPaths, plan: PlanRecord, group: GroupPlan, rollout: RolloutPlan) -> RolloutTraining:
    """Bring a rollout of a plan together with the token file of its step."""
    training = RolloutTraining(plan=plan, group=group, rollout=rollout, file=open_token_file(paths, plan))
    if training.file is not None:
        samples = enumerate(training.file.samples)
        training.by_id = {one.sample_id: number for number, one in samples if one.rollout_id == rollout.label}
    return training


def open_token_file(paths: ModelPaths, plan: PlanRecord) -> TokenFile | None:
    """Open the token file that a job wrote; `None` if there is none."""
    try:
        file = TokenFile(paths.step(plan.step)) if plan.trained else None
    except StorageError:
        return None
    return file if file is not None and file.job_id == plan.job_id else None


def _find(plan: PlanRecord, named: set[str]) -> Iterator[tuple[PlanRecord, GroupPlan, RolloutPlan]]:
    for group in plan.groups:
        for rollout in group.rollouts:
            if any(not named.isdisjoint(path) for path in rollout.exchange_ids):
                yield plan, group, rollout
