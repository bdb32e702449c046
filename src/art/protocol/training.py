"""Wire types of training calls and jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from art.config import ModelSettings, TrainConfig, TrainSFTConfig

JobState = Literal["queued", "running", "succeeded", "failed"]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


JobId = Annotated[str, Field(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Chosen by the caller: the same id never trains twice."""


class RegisterRequest(Wire):
    project: str
    name: str
    base_model: str
    """Hub id or local path."""
    settings: ModelSettings = ModelSettings()


class ModelStatus(Wire):
    project: str
    name: str
    base_model: str
    step: int
    """Newest published checkpoint."""
    inference_name: str
    """What to send as `model`: `project/name`, or `project/name@step` for one checkpoint."""


class WireHistory(Wire):
    """One conversation. An item is a plain message, or `{"choice": <OpenAI choice>}` for a sampled answer."""

    items: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class WireTrajectory(Wire):
    reward: float = 0.0
    turn_rewards: list[float] = []
    """One per choice of the first history; empty for none."""
    token_rewards: list[list[float]] = []
    """For each choice of the first history, one per sampled token; empty for none."""
    histories: list[WireHistory]


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


class JobStatus(Wire):
    job_id: str
    kind: Literal["train", "train_sft"]
    project: str
    name: str
    state: JobState
    step: int | None = None
    """Of the checkpoint that the job made."""
    metrics: dict[str, float] = {}
    findings: list[str] = []
    """What a person should know of the step, in plain words."""
    checkpoint_path: str | None = None
    error: WireError | None = None


class DeleteCheckpointsRequest(Wire):
    keep_steps: list[int]


class DeleteCheckpointsResponse(Wire):
    deleted_steps: list[int]
