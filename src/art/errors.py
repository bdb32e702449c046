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
    |-- JudgeError                  a judge gave no usable scores; the group then has no reward, and never 0
    |   |-- JudgeAnswerError        it answered, but without usable scores
    |   +-- BudgetError             the cost limit of its budget is reached
    |-- FaultRateError              too many of the recent rollouts failed
    |-- GenerationError             a language model wrote no usable scenarios
    |-- RolloutError                a rollout failed outside the policy: it says so itself, or it took too long
    |-- ToolServerError             an MCP server has ended or is late; the rollout fails, and its reward is never 0
    |-- StorageError                reading or writing the data directory failed
    |   |-- DiskFullError
    |   +-- CorruptCheckpointError
    +-- ProcessError                an engine, trainer or server process has ended or does not answer in time

`code` names an error on the wire. `server/errors.py` maps each error to an HTTP status, and `client/http.py` maps the
code back to the class, so a remote failure is caught like a local one. A message says what was given, what was expected
and what to do.
"""

from __future__ import annotations


class ArtError(Exception):
    """Root of ART's errors."""

    code = "internal_error"
    transient = False
    """Whether the same call may succeed a little later."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """Name of the request parameter at fault, as in OpenAI's errors."""


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
    """Seconds until the next try. The OpenAI client waits this long each time, so its 30 tries last minutes."""


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
    """Make the error that a wire code names; an unknown code gives a plain `ArtError` with the same message."""
    by_code = {cls.code: cls for cls in _subclasses(ArtError)}
    return by_code.get(code, ArtError)(message, param=param)
