"""Wire types of checkpoints: listing them, downloading their files, and jobs that copy, export and send them. And what
scripts log for their steps."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from art.config.base import check_no_userinfo
from art.config.base_models import HUB_ID_PATTERN
from art.protocol.training import JobId, SparseWire, Wire

BEST_METRIC = "val/reward"
ExportFormat = Literal["peft", "vllm-lora", "merged", "gguf", "gguf-lora"]


class CheckpointInfo(SparseWire):
    may_lack = ("promoted",)
    step: int
    created_at: float
    """Unix time at which the checkpoint was made."""
    size_bytes: int
    full: bool
    """True for a whole model, false for an adapter."""
    metrics: dict[str, float] = {}
    """Metrics of the step that made the checkpoint, and means of the metrics that scripts logged at it."""
    newest: bool
    """Whether this checkpoint is served and the next step starts from it."""
    best: bool
    """Whether it has the highest mean of the requested metric."""
    in_use: list[str] = []
    """Descriptions of what needs the checkpoint: running requests, unfinished jobs."""
    promoted: bool = False
    """Whether `project/name@promoted` means this checkpoint, which is then never deleted; absent if not."""


class CheckpointList(Wire):
    steps: list[int]
    checkpoints: list[CheckpointInfo]
    """All checkpoints, in the order of steps."""


class FileInfo(Wire):
    name: str
    size: int
    """Size in bytes."""
    sha256: str


class FileList(Wire):
    """The files of a checkpoint or export; the manifest comes last."""

    step: int
    files: list[FileInfo]


class MetricsRow(Wire):
    """Metrics that a script logged at a step. They tell the server which checkpoint is the best."""

    row_id: str = Field(min_length=8, max_length=64)
    """Id of the row. A row that is sent several times counts once."""
    step: int = Field(ge=0)
    metrics: dict[str, float]


class Recorded(Wire):
    row_id: str


class LogRequest(Wire):
    """A row of a model's history, and groups that were logged with it. Large ones come in several requests."""

    split: str
    step: int = Field(ge=0)
    row: dict[str, int | float | str | None] = Field(min_length=1)
    """The row as it is in `history.jsonl` of the script. It has the time at which it was written, `recorded_at`."""
    groups: list[dict[str, Any]]
    """Groups as they are in the script's file of the split and step."""


class Logged(Wire):
    num_groups: int
    """Number of groups of the request, all of which are kept now."""


class CheckpointJobRequest(Wire):
    """Base class of the requests for jobs on a checkpoint."""

    job_id: JobId
    step: int | None = Field(default=None, ge=0)
    """Step of the checkpoint; `None` means the newest one."""


class ForkRequest(CheckpointJobRequest):
    """Copy a checkpoint of another model to this model, as its newest checkpoint and with the same step number."""

    from_name: str
    from_project: str | None = None
    """Project of the other model; `None` means this model's project."""
    not_after_step: int | None = Field(default=None, ge=0)
    """Copy the newest checkpoint whose step is not above this one."""

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.step is not None and self.not_after_step is not None:
            raise ValueError("give `step` or `not_after_step`, not both")
        return self


class ExportRequest(CheckpointJobRequest):
    format: ExportFormat


class HubTarget(Wire):
    kind: Literal["hub"] = "hub"
    repo_id: str = Field(pattern=HUB_ID_PATTERN)
    """Id on the hub: `owner/name`, or a name of the token's own."""
    private: bool = True
    revision: str | None = None


class S3Target(Wire):
    """An S3-compatible store. boto3 finds the credentials in the server's environment."""

    kind: Literal["s3"] = "s3"
    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    """Address of a store other than Amazon's."""

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if self.endpoint_url is not None:
            check_no_userinfo(self.endpoint_url, "endpoint_url")
        return self


class PushRequest(CheckpointJobRequest):
    """Send a checkpoint, or an export of it, to the Hugging Face hub or an S3 store."""

    target: HubTarget | S3Target = Field(discriminator="kind")
    format: Literal["checkpoint"] | ExportFormat = "checkpoint"
    """"checkpoint" sends the checkpoint itself, with the optimiser's state. An export must exist already."""


class PullRequest(CheckpointJobRequest):
    """Fetch a checkpoint that `PushRequest` sent to a store, and make it the newest of this model."""

    source: S3Target
    from_name: str | None = None
    """Name of the model that it was pushed from; `None` means this model's name."""
    from_project: str | None = None
    not_after_step: int | None = Field(default=None, ge=0)
