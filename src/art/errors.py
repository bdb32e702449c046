"""Every error that ART raises on purpose. docs/errors.md draws them as a tree, with what to do about each.

`code` names an error on the wire. `server/errors.py` maps each error to an HTTP status, and `client/http.py` maps the
code back to the class, so a remote failure is caught like a local one. A message says what was given, what was expected
and what to do.
"""

from __future__ import annotations

_BY_CODE: dict[str, type[ArtError]] = {}


class ArtError(Exception):
    """Root of ART's errors."""

    code = "internal_error"
    transient = False
    """Whether the same call may succeed a little later."""

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        """Name the class on the wire; without `code` it has the name of its parent."""
        if code is not None:
            cls.code = code
            _BY_CODE[code] = cls

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """Name of the request parameter at fault, as in OpenAI's errors."""


class ConfigError(ArtError, code="invalid_config"):
    """A setting is wrong, or this backend cannot honour it."""


class RequestError(ArtError, code="invalid_request"):
    """The caller must change the call."""


class AuthenticationError(RequestError, code="invalid_api_key"):
    """The API key is missing or wrong."""


class PermissionDeniedError(RequestError, code="permission_denied"):
    """The API key is right, but may not do this."""


class InvalidRequestError(RequestError, code="invalid_request_error"):
    """A parameter is malformed or out of range."""


class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """Prompt and completion do not fit the model's context."""


class NotFoundError(RequestError, code="not_found"):
    """There is no such model, step, job, rollout or exchange."""


class ConflictError(RequestError, code="conflict"):
    """The call contradicts what is already recorded."""


class RequestTimeoutError(RequestError, code="request_timeout"):
    """The body of a request came too slowly."""

    transient = True


class PayloadTooLargeError(RequestError, code="payload_too_large"):
    """The body of a request is above the limit."""


class UnsupportedMediaError(RequestError, code="unsupported_media_type"):
    """The body of a request is compressed in a way that the server does not know."""


class OverloadedError(RequestError, code="overloaded"):
    """The queue is full. Try again after `retry_after_s`."""

    transient = True
    retry_after_s = 7.0
    """Seconds until the next try. The OpenAI client waits this long each time, so its 30 tries last minutes."""


class TrajectoryError(ArtError, code="invalid_trajectory"):
    """Trajectories cannot be trained as they are."""


class TrajectoryMismatchError(TrajectoryError, code="trajectory_mismatch"):
    """A text was changed after sampling, or its exchange is unknown."""


class NothingTrainableError(TrajectoryError, code="nothing_trainable"):
    """No token of the submitted groups can be learnt from."""


class TrainingError(ArtError, code="training_failed"):
    """A training step failed, for example by a loss that is not finite."""


class JobCancelledError(ArtError, code="job_cancelled"):
    """Somebody cancelled the job."""


class PublishError(ArtError, code="publish_failed"):
    """A checkpoint could not become the served policy."""


class AdapterError(PublishError, code="invalid_adapter"):
    """The file of an adapter is damaged, or the adapter matches no layer."""


class HandshakeError(PublishError, code="handshake_failed"):
    """The engine does not reproduce the log-probs of the trainer's probe."""


class JudgeError(ArtError, code="judge_failed"):
    """A judge gave no usable scores. The group then has no reward, and never 0."""


class JudgeAnswerError(JudgeError, code="judge_answer_unusable"):
    """A judge answered, but without usable scores."""


class BudgetError(ArtError, code="budget_exhausted"):
    """The costs have reached the limit of their budget."""


class FaultRateError(ArtError, code="too_many_faults"):
    """Too many of the recent rollouts failed."""


class GenerationError(ArtError, code="generation_failed"):
    """A language model wrote no usable scenarios."""


class RolloutError(ArtError, code="rollout_failed"):
    """A rollout failed outside the policy: it says so itself, or it took too long."""


class ToolServerError(ArtError, code="tool_server_failed"):
    """An MCP server has ended or is late. The rollout fails, and its reward is never 0."""

    transient = True


class StorageError(ArtError, code="storage_error"):
    """Reading or writing the data directory failed."""


class DiskFullError(StorageError, code="disk_full"):
    """There is no space left on the disk."""


class CorruptCheckpointError(StorageError, code="corrupt_checkpoint"):
    """A file of a checkpoint is missing or damaged."""


class ProcessError(ArtError, code="process_unavailable"):
    """An engine, trainer or server process has ended or does not answer in time."""

    transient = True


def error_from_code(code: str, message: str, *, param: str | None = None) -> ArtError:
    """Make the error that a wire code names; an unknown code gives a plain `ArtError` with the same message."""
    return _BY_CODE.get(code, ArtError)(message, param=param)
