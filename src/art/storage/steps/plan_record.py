"""Read and write `plan-<job>.json`: which rollouts a training job was given, and what became of each.

A job that trained nothing has one too, in the folder of the step at which the model stayed. A job that runs again after
a crash replaces its file. The record names exchanges (recorded requests and answers); a logged trajectory whose choices
name the same exchanges is the same rollout.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.storage.atomic import remove_leftovers, storage_errors, write_file

_log = logging.getLogger(__name__)

NOTHING_SAMPLED = "nothing_sampled"
"""Why a rollout without tokens of the model is not trained."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutPlan(_Record):
    """One submitted trajectory, and what the step does with it."""

    index: int
    """Place in its group in the request, from 0."""
    label: str
    """Name in the ledger and the token file, e.g. `groups[2].trajectories[5]`."""
    reward: float | None = None
    """Reward of the trajectory; `None` if it had none."""
    advantage: float | None = None
    """Mean advantage of its sampled tokens; `None` where the plan computes none."""
    exchange_ids: list[list[str]] = []
    """Exchanges (recorded requests and answers) on each token path of the rollout, in the order of the tokens."""
    context_tokens: int = 0
    """Tokens that another model sampled."""
    trained_tokens: int = 0
    """Sampled tokens that the step trained."""
    dropped_tokens: dict[str, int] = {}
    """Number of sampled tokens that were not trained, by the reason in the ledger, e.g. `no_reward_spread`."""
    untracked_choices: int = 0
    """Choices without a recorded exchange."""

    @property
    def dropped_because(self) -> str | None:
        """The reason that dropped most tokens, if none is trained; `None` for a trained rollout."""
        if self.trained_tokens or (self.context_tokens and not self.dropped_tokens):
            return None
        return max(self.dropped_tokens, key=lambda reason: self.dropped_tokens[reason], default=NOTHING_SAMPLED)

    def drop(self, reason: str, num_tokens: int) -> RolloutPlan:
        """Return the plan with `num_tokens` more of its trained tokens dropped for `reason`."""
        dropped = self.dropped_tokens | {reason: self.dropped_tokens.get(reason, 0) + num_tokens}
        return self.model_copy(update={"trained_tokens": self.trained_tokens - num_tokens, "dropped_tokens": dropped})


class GroupPlan(_Record):
    """One submitted group."""

    index: int
    """Place in the request, from 0. Groups that were logged may have another order."""
    left_out: Literal["equal_rewards", "no_rewards", "single_rollout"] | None = None
    """Why the rewards of the group teach nothing; `None` if they differ."""
    rollouts: list[RolloutPlan]


class PlanRecord(_Record):
    """One training job: what it was given, and what became of it."""

    format: Literal[1] = 1
    job_id: str
    kind: Literal["train", "train_sft"]
    created_at: float
    """When the job ended, in seconds since the epoch."""
    from_step: int
    """Step that the model was at."""
    step: int
    """Step that the model is at after the job: `from_step` if nothing was trained."""
    trained: bool
    ledger: dict[str, float]
    """The closed ledger of the step, `ledger/...`; empty for supervised fine-tuning."""
    has_token_file: bool = False
    """Whether the trainer wrote log-probs, entropies and masks of the trained tokens. Retention may delete the file."""
    groups: list[GroupPlan] = Field(default=[])
    """Empty for supervised fine-tuning."""


def plan_file(folder: Path, job_id: str) -> Path:
    """Path of the record of a job in the folder of its step."""
    return folder / f"plan-{job_id}.json"


def write_plan(folder: Path, record: PlanRecord) -> Path:
    """Write the record of a job to the folder of its step, in place of one that the same job wrote before.

    Raises:
        DiskFullError, StorageError: it cannot be written.
    """
    path = plan_file(folder, record.job_id)
    with storage_errors(path, "writing"):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
    write_file(path, record.model_dump_json(exclude_defaults=True).encode())
    return path


def read_plans(folder: Path) -> list[PlanRecord]:
    """Read the records of all jobs that ended at a step, the oldest first. A damaged file is skipped with a warning."""
    records = []
    for path in sorted(folder.glob("plan-*.json")):
        try:
            records.append(PlanRecord.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            _log.warning("%s cannot be read and is skipped: %s", path, error)
    return sorted(records, key=lambda record: record.created_at)
