"""Wire types of training calls and jobs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from art.config import ModelSettings, TrainConfig, TrainSFTConfig
from art.protocol.job_states import JobKind, JobState


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


JobId = Annotated[str, Field(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Chosen by the caller, in the body or as the header `Idempotency-Key`: the same id never runs twice."""


class RegisterRequest(Wire):
    project: str
    name: str
    base_model: str
    """Hub id or local path."""
    settings: ModelSettings = ModelSettings()


class TokenCounts(Wire):
    prompt: int = 0
    cached: int = 0
    """The part of `prompt` that the engine had computed before."""
    completion: int = 0


class ModelStatus(Wire):
    project: str
    name: str
    base_model: str
    step: int
    """Newest published checkpoint."""
    inference_name: str
    """What to send as `model`: `project/name`, or `project/name@step` for one checkpoint."""
    tokens: TokenCounts | None = None
    """What it has read and written on this server so far; where one model is asked for."""


class WireHistory(Wire):
    """One conversation. An item is a plain message, or `{"choice": <OpenAI choice>}` for a sampled answer."""

    items: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class WireTrajectory(Wire):
    reward: float | None = None
    """`None`: nobody set it. It counts as 0."""
    turn_rewards: list[float] = []
    """One per choice of the first history; empty for none."""
    token_rewards: list[list[float]] = []
    """For each choice of the first history, one per sampled token; empty for none."""
    histories: list[WireHistory]
    policy_fault: bool = False
    """The rollout says that the policy has spoilt it; counted, and trained like any other."""


class WireGroup(Wire):
    """A group without trajectories (every rollout failed) keeps the place of the others, which messages name."""

    trajectories: list[WireTrajectory]


class TrainRequest(Wire):
    job_id: JobId
    groups: list[WireGroup]
    config: TrainConfig = TrainConfig()


class TrainSFTRequest(Wire):
    job_id: JobId
    trajectories: list[WireTrajectory]
    config: TrainSFTConfig = TrainSFTConfig()


class WireError(Wire):
    code: str
    message: str
    param: str | None = None


class JobProgress(Wire):
    phase: str
    """What is being done, in a word: "train", "publish", "copy"."""
    done: int
    total: int
    """In the same unit: micro-batches of a training, bytes of a file."""


class JobStatus(Wire):
    job_id: str
    kind: JobKind
    project: str
    name: str
    state: JobState
    step: int | None = None
    """The step of the checkpoint that the job made, or of the one that it began at if `trained` is false."""
    trained: bool | None = None
    """False if a training succeeded with nothing to learn, which the first of `findings` explains."""
    metrics: dict[str, float] = {}
    findings: list[str] = []
    """What a person should know of the step, in plain words."""
    checkpoint_path: str | None = None
    result: dict[str, Any] = {}
    """What a job that is no training made: where it lies, and how it was found."""
    error: WireError | None = None
    created_at: float | None = None
    """Unix time, as the next two."""
    started_at: float | None = None
    """When it last began to run; a restarted server begins again."""
    ended_at: float | None = None
    queue_place: int | None = None
    """While it is queued: 1 is the next to run."""
    progress: JobProgress | None = None
    """While it runs, the newest."""


class DeleteCheckpointsRequest(Wire):
    """What to keep. The newest, the best and those in use are kept anyway."""

    keep_steps: list[int] = []
    keep_recent: int = Field(default=1, ge=1)
    """So many of the newest."""
    best_metric: str = "val/reward"
    """The best is the one with the highest mean of it."""


class DeleteCheckpointsResponse(Wire):
    deleted_steps: list[int]
