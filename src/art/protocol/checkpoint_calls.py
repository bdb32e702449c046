"""Wire types of checkpoints: what there is, what is fetched, copied, exported and sent elsewhere."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from art.protocol.training import JobId, Wire

BEST_METRIC = "val/reward"
ExportFormat = Literal["peft", "merged", "gguf", "gguf-lora"]


class CheckpointInfo(Wire):
    step: int
    created_at: float
    """Unix time."""
    size_bytes: int
    full: bool
    """A whole model instead of an adapter."""
    metrics: dict[str, float] = {}
    """Of the step that made it, and the means of what was logged at it."""
    newest: bool
    """What is served, and what the next step starts from."""
    best: bool
    """By the metric that was asked for."""
    in_use: list[str] = []
    """What needs it, in words: requests that run, jobs that are not over."""


class CheckpointList(Wire):
    steps: list[int]
    checkpoints: list[CheckpointInfo]
    """In the order of steps."""


class FileInfo(Wire):
    name: str
    size: int
    """Bytes."""
    sha256: str


class FileList(Wire):
    """A checkpoint or export: its files, the manifest last."""

    step: int
    files: list[FileInfo]


class MetricsRow(Wire):
    """Numbers that a script has logged at a step, so that the server knows which checkpoint is the best."""

    row_id: str = Field(min_length=8, max_length=64)
    """The same row counts once, however often it is sent."""
    step: int = Field(ge=0)
    metrics: dict[str, float]


class Recorded(Wire):
    row_id: str


class ForkRequest(Wire):
    """Make a checkpoint of another model the newest of this one, under the same step."""

    job_id: JobId
    from_name: str
    from_project: str | None = None
    """`None`: the same project."""
    step: int | None = Field(default=None, ge=0)
    """`None`: the newest."""
    not_after_step: int | None = Field(default=None, ge=0)
    """The newest that is not above it."""

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.step is not None and self.not_after_step is not None:
            raise ValueError("give `step` or `not_after_step`, not both")
        return self


class ExportRequest(Wire):
    job_id: JobId
    format: ExportFormat
    step: int | None = Field(default=None, ge=0)
    """`None`: the newest."""


class HubTarget(Wire):
    kind: Literal["hub"] = "hub"
    repo_id: str
    private: bool = True
    revision: str | None = None


class S3Target(Wire):
    """An S3-compatible store; keys come from the server's environment, as boto3 finds them."""

    kind: Literal["s3"] = "s3"
    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    """Of a store that is not Amazon's."""


class PushRequest(Wire):
    """Send a checkpoint, or an export of it, elsewhere."""

    job_id: JobId
    target: HubTarget | S3Target = Field(discriminator="kind")
    step: int | None = Field(default=None, ge=0)
    """`None`: the newest."""
    format: Literal["checkpoint"] | ExportFormat = "checkpoint"
    """The checkpoint as it is, with the optimiser's state, or an export of it, which must have been made."""


class PullRequest(Wire):
    """Fetch a checkpoint that `PushRequest` has sent to a store, and make it the newest of this model."""

    job_id: JobId
    source: S3Target
    from_name: str | None = None
    """Of the model that it was pushed from; `None`: this one."""
    from_project: str | None = None
    step: int | None = Field(default=None, ge=0)
    """`None`: the newest there."""
    not_after_step: int | None = Field(default=None, ge=0)
