"""Every error that ART raises on purpose.

    ArtError
    |-- ConfigError                 a setting is wrong, or this backend cannot honour it
    |-- RequestError                a call that the caller must change
    |   |-- AuthenticationError     missing or wrong key
    |   |-- PermissionDeniedError   a right key that may not do this
    |   |-- InvalidRequestError     a parameter is malformed or out of range
    |   |   +-- ContextLengthError  prompt and completion do not fit the model's context
    |   |-- NotFoundError           unknown model, step, job, rollout or exchange
    |   |-- ConflictError           the call contradicts what is already recorded
    |   |-- RequestTimeoutError     the body came too slowly
    |   |-- PayloadTooLargeError    request body above the limit
    |   +-- OverloadedError         queue full; try again after `retry_after_s`
    |-- TrajectoryError             trajectories that cannot be trained as they are
    |   |-- TrajectoryMismatchError text changed after sampling, or an unknown exchange
    |   +-- NothingTrainableError   no token of the submitted groups can be learnt from
    |-- TrainingError               the step itself failed (non-finite loss, ...)
    |-- JobCancelledError           somebody cancelled the job
    |-- PublishError                a checkpoint could not become the served policy
    |   |-- AdapterError            adapter file corrupted, or it matches no layer
    |   +-- HandshakeError          the engine does not reproduce the trainer's probe
    |-- JudgeError                  a judge gave no usable scores; the group has no reward then, never a reward of 0
    |   |-- JudgeAnswerError        it answered, but not with scores that can be used
    |   +-- BudgetError             the cost limit of its budget is reached
    |-- GenerationError             a language model wrote no scenarios that can be used
    |-- RolloutError                a rollout failed outside of the policy, by what it says itself or by its time limit
    |-- ToolServerError             an MCP server is gone or late; a rollout fails then, and is never a reward of 0
    |-- StorageError                reading or writing the data directory failed
    |   |-- DiskFullError
    |   +-- CorruptCheckpointError
    +-- ProcessError                an engine, trainer or server process is gone or late

`code` names an error on the wire. `server/app.py` turns each into an HTTP status and `client.py` turns the code back
into the class, so a remote failure is caught like a local one. A message says what was given, what was expected and
what to do.
"""

from __future__ import annotations


class ArtError(Exception):
    """Root of ART's errors."""

    code = "internal_error"
    transient = False
    """Whether the same call may succeed a little later without any change."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The request parameter at fault, as OpenAI's error shape names it."""


class ConfigError(ArtError):
    code = "invalid_config"


class RequestError(ArtError):
    code = "invalid_request"


class AuthenticationError(RequestError):
    code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    code = "permission_denied"


class InvalidRequestError(RequestError):
    code = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class NotFoundError(RequestError):
    code = "not_found"


class ConflictError(RequestError):
    code = "conflict"


class RequestTimeoutError(RequestError):
    code = "request_timeout"
    transient = True


class PayloadTooLargeError(RequestError):
    code = "payload_too_large"


class OverloadedError(RequestError):
    code = "overloaded"
    transient = True
    retry_after_s = 7.0
    """The OpenAI client waits just as long each time; its 30 tries then outlast a queue of minutes, not of seconds."""


class TrajectoryError(ArtError):
    code = "invalid_trajectory"


class TrajectoryMismatchError(TrajectoryError):
    code = "trajectory_mismatch"


class NothingTrainableError(TrajectoryError):
    code = "nothing_trainable"


class TrainingError(ArtError):
    code = "training_failed"


class JobCancelledError(ArtError):
    code = "job_cancelled"


class PublishError(ArtError):
    code = "publish_failed"


class AdapterError(PublishError):
    code = "invalid_adapter"


class HandshakeError(PublishError):
    code = "handshake_failed"


class JudgeError(ArtError):
    code = "judge_failed"


class JudgeAnswerError(JudgeError):
    code = "judge_answer_unusable"


class BudgetError(ArtError):
    code = "budget_exhausted"


class FaultRateError(ArtError):
    code = "too_many_faults"


class GenerationError(ArtError):
    code = "generation_failed"


class RolloutError(ArtError):
    code = "rollout_failed"


class ToolServerError(ArtError):
    code = "tool_server_failed"
    transient = True


class StorageError(ArtError):
    code = "storage_error"


class DiskFullError(StorageError):
    code = "disk_full"


class CorruptCheckpointError(StorageError):
    code = "corrupt_checkpoint"


class ProcessError(ArtError):
    code = "process_unavailable"
    transient = True


def _subclasses(cls: type[ArtError]) -> list[type[ArtError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


def error_from_code(code: str, message: str, *, param: str | None = None) -> ArtError:
    """The error that a wire code names; an unknown code gives a plain `ArtError` with the message kept."""
    by_code = {cls.code: cls for cls in _subclasses(ArtError)}
    return by_code.get(code, ArtError)(message, param=param)
