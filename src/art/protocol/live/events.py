"""Events of the live view: requests as they are sampled, training as it goes on, and lines of the server's log.

    reset  request_started ...  tokens  tokens  request_ended  job_progress  step  finding  log

A stream begins with `reset`, then `request_started` for each request that runs, and `request_ended` for the newest that
have ended. Requests are named by the id of their exchange, which is also the id in the record.
"""

from __future__ import annotations

import functools
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from art.protocol.job_states import JobKind, JobState


class Data(BaseModel):
    """Base class of what an event says."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class Reset(Data):
    """Forget all requests: those that run now follow. It comes first, and after events were lost."""

    kind: Literal["reset"] = "reset"
    num_lost_tokens: int = 0
    """Tokens that were sampled and never sent to this viewer, because it reads too slowly or was away for too long."""


class RequestStarted(Data):
    """A request waits for the engine or is being computed. Each choice of a request with `n` above 1 is one."""

    kind: Literal["request_started"] = "request_started"
    id: str
    project: str
    name: str
    """Name of the model."""
    policy_version: int
    rollout_id: str | None
    last_role: str | None
    last_text: str
    """Beginning of the last message of the prompt, at most `LAST_TEXT_CHARS` characters."""
    num_prompt_tokens: int
    max_tokens: int
    started_at: float
    """Unix time."""
    text: str = ""
    """What was sampled before the viewer came; only the end of a long text."""
    num_tokens: int = 0
    """Tokens that were sampled before the viewer came."""
    is_text_known: bool = True
    """False for a request that began when nobody was watching: its text comes as a whole when it ends."""


class Piece(Data):
    """Tokens of one request."""

    id: str
    text: str
    """The tokens' text as it was sampled, with reasoning, tool calls and special tokens. Characters of several tokens
    come with the last of them."""
    num_tokens: int


class Tokens(Data):
    """What the requests of a project have sampled since the last such event."""

    kind: Literal["tokens"] = "tokens"
    pieces: list[Piece]


class RequestEnded(Data):
    """A request has its answer, failed, or was cancelled by its client."""

    kind: Literal["request_ended"] = "request_ended"
    id: str
    project: str
    name: str
    policy_version: int
    rollout_id: str | None
    outcome: Literal["stop", "length", "tool_calls", "cancelled", "failed"]
    error: str | None = None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the engine had in its cache."""
    num_tokens: int
    started_at: float
    total_s: float
    """From the request's arrival at the engine's queue to its end."""
    queue_s: float | None
    """Wait for a place at the engine. This and the next two are null where the engine does not tell them."""
    prefill_s: float | None
    """Computation of the prompt, up to the first sampled token."""
    decode_s: float | None
    """From the first sampled token to the last."""


class JobMoved(Data):
    """A job began, made progress or ended."""

    kind: Literal["job_progress"] = "job_progress"
    job_id: str
    job_kind: JobKind
    project: str
    name: str
    state: JobState
    phase: str | None = None
    """What a running job does, e.g. "train" or "publish"."""
    done: int | None = None
    total: int | None = None
    """Amount of work in the unit of `done`: micro-batches of a training, bytes of a file."""
    error: str | None = None


class StepEnded(Data):
    """A training step has ended."""

    kind: Literal["step"] = "step"
    project: str
    name: str
    step: int
    trained: bool
    """Whether the step made a checkpoint."""
    metrics: dict[str, float]
    """The few metrics that the live view shows."""


class FindingMade(Data):
    """Something that a person should know about a step."""

    kind: Literal["finding"] = "finding"
    project: str
    name: str
    step: int | None
    text: str


class LogLine(Data):
    """A line of the server's log. Only viewers of all projects get them."""

    kind: Literal["log"] = "log"
    level: str
    logger: str
    text: str
    num_left_out: int = 0
    """Lines before this one that were left out, because too many came."""


LAST_TEXT_CHARS = 600
LiveData = Annotated[
    Reset | RequestStarted | Tokens | RequestEnded | JobMoved | StepEnded | FindingMade | LogLine,
    Field(discriminator="kind"),
]


class LiveEvent(Data):
    """One server-sent event: `number` is its id and `data.kind` its name."""

    number: int
    """Viewers that reconnect name the last number that they have got. It grows, also over restarts of the server."""
    at: float
    """Unix time."""
    data: LiveData

    @functools.cached_property
    def body(self) -> bytes:
        """`data` as JSON, which is made once for all viewers."""
        return self.data.model_dump_json().encode()
