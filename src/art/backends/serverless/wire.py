"""Types of the Serverless Training API, as far as ART uses it.

The public description of the API is version 1.0.0, of 2026. Requests forbid unknown fields. Answers ignore them: the
service belongs to somebody else, and may add a field at any time.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from art.trajectory import finite_number


def finite_numbers(values: Any) -> dict[str, float]:
    """Return those metrics of the service that are finite numbers. A loss, for example, may be none."""
    pairs = values.items() if isinstance(values, dict) else ()
    return {str(name): number for name, value in pairs if (number := finite_number(value)) is not None}


class Request(BaseModel):
    """Base class of what is sent."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """Base class of what the service answers."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateModel(Request):
    entity: str | None
    """Team or user in W&B that owns the model; `None` for the owner of the key."""
    project: str
    name: str
    base_model: str
    return_existing: Literal[True] = True
    """Answer with the model of this name if there is one, so that the call can be repeated."""


class ServiceModel(Answer):
    id: str
    entity: str
    project: str
    name: str
    base_model: str
    run_id: str | None = None
    """Id of the run in W&B that belongs to the model."""

    @property
    def inference_name(self) -> str:
        """Name to send as `model` in chat requests; the newest checkpoint answers."""
        return f"wandb-artifact:///{self.entity}/{self.project}/{self.name}"


class RlConfig(Request):
    """Settings of a step of reinforcement learning: the ones of `ExperimentalTrainingConfig` that ART maps to."""

    learning_rate: float
    loss_fn: Literal["cispo", "ppo"]
    ppo: bool
    """Older word for `loss_fn="ppo"`; both are sent, so that neither version of the service can read another loss."""
    epsilon: float
    epsilon_high: float
    scale_rewards: bool
    normalize_advantages: bool
    """Newer word for `scale_rewards`."""
    importance_sampling_level: Literal["token"] = "token"
    precalculate_logprobs: bool = False
    """Compare with the trainer's log-probs at the start of the step instead of the sampled ones."""
    truncated_importance_sampling: float | None = None
    kl_penalty_coef: float = 0.0
    kl_penalty_reference_step: int | None = None


class CreateRlJob(Request):
    model_id: str
    trajectory_groups: list[dict[str, Any]]
    experimental_config: RlConfig


class SftConfig(Request):
    batch_size: int
    learning_rate: float | list[float]


class CreateSftJob(Request):
    model_id: str
    training_data_url: str
    """Address of a W&B artifact with the file `train.jsonl`."""
    config: SftConfig


class CreatedJob(Answer):
    id: str


class JobEvent(Answer):
    """An event of a training job."""

    id: str
    type: str
    """`training_started` with `num_sequences`, `gradient_step` with metrics, `training_ended`, or `training_failed`
    with `error_message`."""
    data: dict[str, Any]


class EventPage(Answer):
    data: list[JobEvent]
    has_more: bool


class Checkpoint(Answer):
    id: str
    step: int
    metrics: dict[str, float] = {}
    """Metrics of the checkpoint that are finite numbers."""

    @field_validator("metrics", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> dict[str, float]:
        return finite_numbers(value)


class CheckpointPage(Answer):
    data: list[Checkpoint]
    has_more: bool


class DeleteSteps(Request):
    steps: list[int]


class LogGroups(Request):
    model_id: str
    split: str
    trajectory_groups: list[dict[str, Any]]
