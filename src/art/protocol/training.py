"""Wire types of training calls and jobs, and of the preflight: the checks before a training."""

from __future__ import annotations

import contextlib
import itertools
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from art.config import ModelSettings, TrainConfig, TrainSFTConfig

W = TypeVar("W", bound=BaseModel)


class _FirstFault(FailFast):
    __hash__ = object.__hash__  # Python 3.11 needs it for `Objects | None`


Objects: TypeAlias = Annotated[list[dict[str, Any]], _FirstFault()]
"""A list of messages, tools or the like. Checking ends at the first one that is wrong, as only that one is reported."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SparseWire(Wire):
    """A body that is sent without the fields in `may_lack` where they have their default: an older program refuses
    fields that it does not know."""

    may_lack: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        body: dict[str, Any] = serialize(self)
        for name in self.may_lack:
            if getattr(self, name) == type(self).model_fields[name].default:
                del body[name]
        return body


JobId = Annotated[str, Field(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Id that the caller chooses. The same id never runs twice."""


class RegisterRequest(Wire):
    project: str
    name: str
    base_model: str
    """Hugging Face hub id, short name, or path on the server."""
    settings: ModelSettings = ModelSettings()


class TokenCounts(Wire):
    prompt: int = 0
    cached: int = 0
    """The part of `prompt` that the engine had in its cache."""
    completion: int = 0


class ModelStatus(SparseWire):
    may_lack = ("promoted_step", "steps_at_once", "max_context")
    project: str
    name: str
    base_model: str
    step: int
    """Step (number) of the checkpoint that is served."""
    inference_name: str
    """Value of `model` in chat requests: `project/name`. With `@step` appended it asks one checkpoint, with `@promoted`
    the promoted one."""
    created_at: float = 0.0
    """When the model was first registered, in seconds since the epoch."""
    serves_base: bool = False
    """Whether chat requests can name the base model to ask it without any training."""
    tokens: TokenCounts | None = None
    """Tokens that the model has read and sampled on this server. Only in the status of a single model."""
    promoted_step: int | None = None
    """Step of the promoted checkpoint; absent while nothing is promoted."""
    steps_at_once: int | None = None
    """Number of steps that the engine can serve at the same time; absent where any number of adapters can be asked. It
    is 1 for merged weights and 2 for full fine-tuning on the embedded engine."""
    max_context: int | None = None
    """Most tokens of prompt and answer together. Only in the status of a single model, while its engine is up."""


class WireAnswer(Wire):
    """An answer in a conversation that is sent without its texts."""

    exchange_id: str | None
    """The recorded answer; `None` for one that was made elsewhere."""
    digest: str = ""
    """`conversation_digest` of all messages up to and including a recorded answer, by which an edit is noticed."""


class WireHistory(SparseWire):
    """One conversation of a rollout, with its texts or only with the names of its answers.

    With `items`, each item is a plain message, or `{"choice": <OpenAI choice>}` for an answer. With `answers` the
    server has the texts in its record. Only reinforcement learning takes these.
    """

    may_lack = ("items", "tools", "answers", "num_copied_answers")
    items: Objects = []
    tools: Objects | None = None
    answers: Annotated[list[WireAnswer], _FirstFault()] | None = None
    """The choices of the conversation, in order."""
    num_copied_answers: int = Field(default=0, ge=0)
    """Number of plain assistant messages in the conversation. Used with `answers` only."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.answers is not None and self.items:
            raise ValueError("give a conversation either as `items` or as `answers`, not as both")
        return self


class WireTrajectory(Wire):
    reward: float | None = None
    """`None` if it was never set; it then counts as 0."""
    turn_rewards: Annotated[list[float], FailFast()] = []
    """One reward for each choice (sampled answer) of the first history; empty for none."""
    token_rewards: Annotated[list[Annotated[list[float], FailFast()]], FailFast()] = []
    """For each choice (sampled answer) of the first history, one reward per sampled token; empty for none."""
    histories: Annotated[list[WireHistory], FailFast()]
    policy_fault: bool = False
    """Whether the rollout reports that the policy spoilt it. It is trained like any other; only metrics count it."""


class WireGroup(Wire):
    """The trajectories of one scenario. A group is empty if every rollout failed. It is sent anyway, so that messages
    name the other groups by their right index."""

    trajectories: Annotated[list[WireTrajectory], FailFast()]


class TrainRequest(Wire):
    job_id: JobId
    groups: Annotated[list[WireGroup], FailFast()]
    config: TrainConfig = TrainConfig()
    sft: Annotated[list[WireTrajectory], FailFast()] = []
    """Trajectories whose assistant messages are learnt in the same step, with their texts."""


class TrainSFTRequest(Wire):
    job_id: JobId
    trajectories: Annotated[list[WireTrajectory], FailFast()]
    config: TrainSFTConfig = TrainSFTConfig()


def validate_training(kind: type[W], body: Any) -> W:
    """Check the decoded body of a training call, one trajectory at a time, so that other threads run in between. Raises
    `ValidationError` if it is not a `kind`."""
    with contextlib.suppress(ValidationError, AttributeError, TypeError):  # reported by the last line
        for holder in itertools.chain((body,), body.get("groups") or ()):  # a text there is not taken apart
            for trajectories in (holder.get("trajectories"), holder.get("sft")):
                for i, trajectory in enumerate(trajectories or ()):
                    trajectories[i] = WireTrajectory.model_validate(trajectory)
    return kind.model_validate(body)


class WireError(Wire):
    code: str
    message: str
    param: str | None = None


JobKind = Literal["train", "train_sft", "fork", "export", "push", "pull"]
JobState = Literal["queued", "running", "cancelling", "succeeded", "failed", "cancelled"]
NEXT_STATES: dict[JobState, frozenset[JobState]] = {
    "queued": frozenset({"running", "failed", "cancelled"}),
    "running": frozenset({"queued", "cancelling", "succeeded", "failed"}),
    "cancelling": frozenset({"cancelled", "succeeded", "failed"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""The one table of allowed changes of state.

    queued --> running --> succeeded
      |  ^      |  |  \\
      |  +------+  |   +--> failed           a running job is queued again when the server died
      |            v
      |        cancelling --> cancelled      or succeeded, or failed, when the stop came too late
      +--> failed, cancelled
"""
ENDED: frozenset[JobState] = frozenset(state for state, following in NEXT_STATES.items() if not following)
UNFINISHED: tuple[JobState, ...] = tuple(state for state in get_args(JobState) if state not in ENDED)


class JobProgress(Wire):
    phase: str
    """Name of the current phase, e.g. "train", "publish" or "copy"."""
    done: int
    total: int
    """Total amount of work, in the unit of `done`: micro-batches of a training, bytes of a file."""


class JobStatus(Wire):
    job_id: str
    kind: JobKind
    project: str
    name: str
    state: JobState
    step: int | None = None
    """Step of the checkpoint that the job made; if `trained` is false, the step that it started from."""
    trained: bool | None = None
    """False if a training succeeded with nothing to learn; the first of `findings` says why."""
    metrics: dict[str, float] = {}
    findings: list[str] = []
    """What a person should know about the step, in plain words."""
    checkpoint_path: str | None = None
    result: dict[str, Any] = {}
    """Result of a job other than a training, e.g. the path of an export."""
    error: WireError | None = None
    created_at: float | None = None
    """Unix time of the request for the job."""
    started_at: float | None = None
    """Unix time at which the job last began to run. A restarted server begins it again."""
    ended_at: float | None = None
    queue_place: int | None = None
    """Place in the queue while the job waits; 1 is the next to run."""
    progress: JobProgress | None = None
    """Newest progress, while the job runs."""


class JobList(Wire):
    jobs: list[JobStatus]
    """The jobs, newest first."""


class ExchangeIds(Wire):
    """Ids of exchanges (recorded answers): those that are asked about, or those that are missing."""

    exchange_ids: list[str]


class DeleteCheckpointsRequest(Wire):
    """Which checkpoints to keep. The newest, the best, the promoted and those in use are always kept."""

    keep_steps: list[int] = []
    keep_recent: int = Field(default=1, ge=1)
    """Number of newest checkpoints to keep."""
    best_metric: str = "val/reward"
    """The checkpoint with the highest mean of this metric is the best."""


class DeleteCheckpointsResponse(Wire):
    deleted_steps: list[int]


CheckStatus = Literal["ok", "warning", "failure"]


class MemoryPart(Wire):
    """Memory that engine or trainer needs of one device for one thing, such as the optimiser's moments."""

    where: str
    """The device, e.g. `cuda:0 (NVIDIA H100)`, or `this machine` for main memory."""
    owner: Literal["engine", "trainer"]
    name: str
    size_bytes: int


class CheckResult(Wire):
    """Result of one check of what training a model needs."""

    name: str
    status: CheckStatus
    found: str
    """What the check saw, in plain words."""
    remedy: str | None = None
    """What the user can do about a problem; `None` if there is none."""
    measured: dict[str, float] = {}
    memory: list[MemoryPart] = []
    """The parts of a memory forecast; empty for other checks."""


class PreflightRequest(Wire):
    quick: bool = True
    """Check versions, devices, disk space and chat format, which takes about a second."""
    trial: bool = True
    """Run a step in the trainer process on one sequence of random tokens."""
    trial_tokens: int | None = Field(default=None, ge=2)
    """Length in tokens of the sequence of the trial; `None` means the longest that the engine takes."""
    groups: list[WireGroup] = []
    """Rollouts that this server sampled. A trial step runs on them, and a check measures whether their answers depend
    on what the model was shown."""


class PreflightReport(Wire):
    checks: list[CheckResult]
