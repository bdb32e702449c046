"""What is kept of each training step beside its checkpoint, in `steps/<step>/` of a model's folder.

`tokens.safetensors` has the log-prob, entropy and mask reason of each target (trained token):

    index             zlib of JSON: for each sample, in the depth-first order of the step's prefix tree, its names, the
                      places of its targets, what it shares with the sample before it, its factors
    policy_logprobs   [N] float16, under the trained policy in the pass that computed the target's gradient
    log_ratios        [N] float16, policy_logprobs minus the sampler's, from float32 values
    entropy           [N] float16, nats, of the distribution that the target was drawn from
    reasons           [N] uint8, `TokenReason`
    anchor_ratios     [N] float16, policy_logprobs minus the anchor's; only where the loss has an anchor of its own
    advantages        [N] float16; files of older versions have runs of equal ones in the index instead

The N targets follow one another in the order of the index. To read one rollout, read the index and its part of each
column. A log-ratio keeps its precision where both log-probs are large numbers that nearly cancel out; the sampler's
log-prob follows from the two, also when the exchange (recorded request and answer) has been deleted.

`plan-<job>.json` says which rollouts a training job was given, and what became of each. A job that trained nothing has
one too, in the folder of the step at which the model stayed. A job that runs again after a crash replaces its file. It
names exchanges; a logged trajectory whose choices name the same exchanges is the same rollout.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from art.errors import StorageError
from art.protocol.samples import Component
from art.storage.atomic import remove_leftovers, storage_errors, write_file

_log = logging.getLogger(__name__)

FORMAT = 1
NAME = "tokens.safetensors"


class TokenReason(IntEnum):
    """What became of a target. The first three were learnt."""

    TRAINED = 0
    TRUNCATED = 1
    """Learnt with an importance weight that `mismatch.truncate` cut."""
    CAPPED = 2
    """Learnt with a ratio that a bound of the loss cut."""
    CLIPPED = 3
    """The policy had moved beyond a bound of the loss, which drops the token."""
    NO_ADVANTAGE = 4
    """The advantage is 0, and no other term of the loss learns from the token."""
    NO_GRADIENT = 5
    """The loss gives the token no gradient for another reason, e.g. a custom loss leaves it out."""
    FORCED = 6
    """The constraint (grammar, kept tokens) left no other token, so there is nothing to learn."""
    MISMATCHED_ROLLOUT = 7
    """The gate left the rollout out: the trained policy did not produce it."""
    MISMATCHED_TOKEN = 8
    """The gate left the token out: its importance ratio is outside of the bounds for tokens."""
    UNPAIRED = 9
    """The rollout lost the counterpart that it was to be compared with, or was left out with it."""
    REFUSED = 10
    """The token could not be drawn under the recorded grammar or kept tokens, so its sample was refused."""

    @property
    def is_learnt(self) -> bool:
        """Whether the token added to the gradient."""
        return self <= TokenReason.CAPPED

    @property
    def dropped_as(self) -> Literal["sampler_mismatch", "constraint_mismatch"] | None:
        """The reason in the ledger; `None` for tokens that the ledger counts as trained."""
        if self == TokenReason.REFUSED:
            return "constraint_mismatch"
        return "sampler_mismatch" if self >= TokenReason.MISMATCHED_ROLLOUT else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSample:
    """One token path of a step. `[start, end)` of a span are places in the path's tokens, from the first prompt on."""

    sample_id: str
    rollout_id: str
    """Label of the rollout in the request, e.g. `groups[2].trajectories[5]`."""
    group_id: str | None
    component: Component
    num_inputs: int
    """Tokens that the trainer computed for the path: all up to the last one that predicts a target."""
    shared: int
    """Number of leading inputs that it shares with the sample before it in the index."""
    spans: list[list[int]]
    """Begin and end of each run of targets."""
    weight: float
    """Factor of each target's loss."""
    scale: float
    """`weight` divided by the sum of the shares of its component in its update: the factor in the update's loss."""
    temperature: float
    policy_version: int
    """Step of the oldest weights that sampled a token of the path."""
    update: int
    """Number of the optimiser update in the step, from 0. Updates before it had changed the policy already."""
    micro_batch: int
    """Number of the forward pass, over all updates and processes. A pass computes what its samples share once."""
    advantages: list[list[float]] = field(default_factory=list)
    """Runs of equal advantages as the loss used them: [value, number of targets]. Empty if the file has a column."""
    is_refused: bool = False
    """Whether the trainer refused the sample (`TokenReason.REFUSED`). It has no values and no part in the tree."""

    @property
    def num_targets(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The content of a token file."""

    job_id: str
    from_step: int
    samples: Sequence[RecordedSample]
    """In the depth-first order of the prefix tree; refused samples last."""
    columns: dict[str, NDArray[Any]]  # [N] each
    """Values of the targets of all samples that are not refused, in the order of the samples."""


_FIELDS = tuple(each.name for each in fields(RecordedSample))


def write_token_file(folder: Path, tokens: StepTokens) -> int:
    """Write the token file of a step to the folder of the step, in place of one that is there. Returns its size. Raises
    `DiskFullError` or `StorageError` if it cannot be written. A file that was there stays."""
    rows = [asdict(sample) for sample in tokens.samples]
    columns = {name: [row[name] for row in rows] for name in _FIELDS}
    index = {"format": FORMAT, "job_id": tokens.job_id, "from_step": tokens.from_step, "samples": columns}
    packed = np.frombuffer(zlib.compress(orjson.dumps(index), 6), dtype=np.uint8)
    data = save({"index": packed, **tokens.columns})
    with storage_errors(folder, "writing"):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
    write_file(folder / NAME, data)
    return len(data)


class TokenFile:
    """A token file that was opened for reading. It reads no more than is asked for."""

    def __init__(self, folder: Path) -> None:
        """Read the index of the token file of a step. Raises `StorageError` if the file is missing or damaged, or
        another version wrote it."""
        self.path = folder / NAME
        try:
            with safe_open(self.path, framework="numpy") as file:
                index = orjson.loads(zlib.decompress(file.get_tensor("index").tobytes()))
                self.columns = frozenset(file.keys()) - {"index"}
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']}, this version reads {FORMAT}")
            rows = zip(*(index["samples"][name] for name in _FIELDS), strict=True)
            self.samples = [RecordedSample(**dict(zip(_FIELDS, row, strict=True))) for row in rows]
            self.job_id: str = index["job_id"]
            self.from_step: int = index["from_step"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise StorageError(f"the token file {self.path} cannot be read: {type(error).__name__}: {error}") from error
        counts = [0 if sample.is_refused else sample.num_targets for sample in self.samples]
        self._first = np.cumsum([0, *counts]).tolist()

    def read(self, number: int, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
        """Read the values of the targets of sample `number`, by column; nothing for a refused sample.

        `advantages` are always there, from the column or from the runs of the index.

        Raises:
            StorageError: the file is gone or damaged.
        """
        sample = self.samples[number]
        if sample.is_refused:
            return {}
        values = self._read(self._first[number], self._first[number + 1], names)
        if "advantages" not in self.columns and (names is None or "advantages" in names):
            runs = np.asarray(sample.advantages, dtype=np.float64).reshape(-1, 2)
            values["advantages"] = np.repeat(runs[:, 0], runs[:, 1].astype(np.int64))
        return values

    def read_all(self, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
        """Read whole columns [N]. Raises `StorageError` if the file is gone or damaged."""
        return self._read(0, self._first[-1], names)

    def _read(self, start: int, end: int, names: Iterable[str] | None) -> dict[str, NDArray[Any]]:
        chosen = self.columns if names is None else self.columns.intersection(names)
        try:
            with safe_open(self.path, framework="numpy") as file:
                return {name: file.get_slice(name)[start:end] for name in sorted(chosen)}
        except (OSError, SafetensorError, ValueError) as error:
            raise StorageError(f"the token file {self.path} cannot be read: {error}") from error

    def count_dropped(self) -> dict[str, dict[str, int]]:
        """Count the sampled tokens of each rollout that the trainer dropped, by the reason in the ledger."""
        reasons = self.read_all(["reasons"])["reasons"]
        dropped: dict[str, dict[str, int]] = {}
        for sample, (first, last) in zip(self.samples, itertools.pairwise(self._first), strict=True):
            if sample.component != "rl":
                continue
            if sample.is_refused:
                counts = {int(TokenReason.REFUSED): sample.num_targets}
            else:
                counts = dict(enumerate(np.bincount(reasons[first:last]).tolist()))
            for reason, count in counts.items():
                name = TokenReason(reason).dropped_as
                if name is not None and count:
                    of_rollout = dropped.setdefault(sample.rollout_id, {})
                    of_rollout[name] = of_rollout.get(name, 0) + count
        return dropped


KEPT_TOKEN_FILES = 500
"""Newest steps whose token files stay on disk: about 8 bytes per token, 1 GB for steps of 256,000 tokens."""


def remove_old_token_files(steps: Path, *, newest: int, keep: int) -> None:
    """Delete the token files of all but the `keep` newest steps.

    Args:
        steps: folder of the steps' folders.
        newest: number of the newest step.

    Raises:
        StorageError: a file cannot be deleted.
    """
    for folder in steps.iterdir() if steps.is_dir() else ():
        if folder.name.isdigit() and int(folder.name) <= newest - keep:
            with storage_errors(folder / NAME, "deleting"):
                (folder / NAME).unlink(missing_ok=True)


# -- the plan of a job --

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
    """Write the record of a job to the folder of its step, in place of one that the same job wrote before. Raises
    `DiskFullError` or `StorageError` if it cannot be written."""
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
