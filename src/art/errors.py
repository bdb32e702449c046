"""Every error that ART raises on purpose. docs/errors.md draws them as a tree, with what to do about each.

`code` names an error on the wire. `server/answers.py` maps each error to an HTTP status, and `client/http.py` maps the
code back to the class, so a remote failure is caught like a local one. A message says what was given, what was expected
and what to do.
"""

from __future__ import annotations

LONGEST_MESSAGE, LONGEST_PARAM = 10_000, 200
"""Characters of an error. It may quote what somebody has sent, which can be megabytes."""
_BY_CODE: dict[str, type[ArtError]] = {}


class ArtError(Exception):
    """Base class of every error that ART raises on purpose."""

    code = "internal_error"
    transient = False
    """Whether the same call may succeed a little later."""

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        """Name the class on the wire; without `code` it has the name of its parent."""
        if code is not None:
            cls.code = code
            _BY_CODE[code] = cls

    def __init__(self, message: str, *, param: str | None = None) -> None:
        message = _cut(message, LONGEST_MESSAGE)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else _cut(param, LONGEST_PARAM)
        """Name of the request parameter at fault, as in OpenAI's errors."""


def _cut(text: str, longest: int) -> str:
    """Leave out the middle of a text that is too long."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    end = longest // 2
    return f"{text[: longest - end]} [{left_out} characters left out] {text[-end:]}"


class ConfigError(ArtError, code="invalid_config"):
    """A setting is wrong, or this backend cannot honour it."""


class RequestError(ArtError, code="invalid_request"):
    """A request or call was refused; the subclass says why."""


class AuthenticationError(RequestError, code="invalid_api_key"):
    """The API key is missing or wrong."""


class PermissionDeniedError(RequestError, code="permission_denied"):
    """The API key is right, but may not do this."""


class InvalidRequestError(RequestError, code="invalid_request_error"):
    """A parameter of a request or call is malformed or out of range."""


class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """Prompt and completion do not fit the model's context."""


class NotFoundError(RequestError, code="not_found"):
    """There is no such model, step, job, rollout or exchange (recorded answer)."""


class ConflictError(RequestError, code="conflict"):
    """The request contradicts what the server has stored, for example by changing a finished rollout."""


class PromotionError(ConflictError, code="promotion_refused"):
    """A checkpoint does not pass the gate of its promotion. The one that was promoted before stays."""


class RequestTimeoutError(RequestError, code="request_timeout"):
    """The client sent the body of its request too slowly."""

    transient = True


class PayloadTooLargeError(RequestError, code="payload_too_large"):
    """The body of a request has more bytes than the server accepts."""


class UnsupportedMediaError(RequestError, code="unsupported_media_type"):
    """The body of a request is compressed. The server takes plain ones."""


class OverloadedError(RequestError, code="overloaded"):
    """A queue is full, or a limit on requests is reached. Try again after `retry_after_s` seconds."""

    transient = True
    retry_after_s = 7.0
    """Seconds until the next try. The OpenAI client waits this long each time, so its 30 tries last minutes."""


class QuotaError(RequestError, code="quota_exceeded"):
    """The project has used up what it may in this month. Running work ends as usual; further work is refused."""


class TrajectoryError(ArtError, code="invalid_trajectory"):
    """Training cannot use the trajectories as they are, for example because a reward is not a number."""

    def __init__(self, message: str, *, param: str | None = None, group: int | None = None) -> None:
        super().__init__(message, param=param)
        self.group = group
        """Index of the group at fault among those of the request; `None` if no single one is."""


class TrajectoryMismatchError(TrajectoryError, code="trajectory_mismatch"):
    """The text of an answer was changed after it was sampled, or the server has no record of the answer."""


class NothingTrainableError(TrajectoryError, code="nothing_trainable"):
    """The submitted trajectories have no token to learn from, for example because all rewards are equal."""


class ConstraintMismatchError(NothingTrainableError, code="constraint_mismatch"):
    """No submitted answer matches the grammar, or the kept tokens, that it was recorded with."""


class TrainingError(ArtError, code="training_failed"):
    """A training step failed, for example by a loss that is not finite."""


class JobCancelledError(ArtError, code="job_cancelled"):
    """Somebody cancelled the training or checkpoint job before it ended."""


class PublishError(ArtError, code="publish_failed"):
    """A new checkpoint could not be loaded into the engine. The server goes on with the older one."""


class AdapterError(PublishError, code="invalid_adapter"):
    """The file of a LoRA adapter is damaged, or the adapter matches no layer of the base model."""


class HandshakeError(PublishError, code="handshake_failed"):
    """The engine's weights or log-probs of a test text differ from the trainer's, or it does not apply adapters."""


class JudgeError(ArtError, code="judge_failed"):
    """A language model that judges rollouts gave no usable scores. The group gets no reward, not even 0."""


class JudgeAnswerError(JudgeError, code="judge_answer_unusable"):
    """A language model that judges rollouts answered, but the answer has no usable scores."""


class BudgetError(ArtError, code="budget_exhausted"):
    """The costs that were booked have reached the limit of the budget."""


class FaultRateError(ArtError, code="too_many_faults"):
    """More of the recent rollouts failed than the `FaultWatch` of the run allows."""


class GenerationError(ArtError, code="generation_failed"):
    """A language model that was asked to write scenarios (task inputs) wrote none that can be used."""


class RolloutError(ArtError, code="rollout_failed"):
    """A rollout failed, and not through the policy: its outcome is `infra_fault`, or its reward is no finite number."""


class ToolServerError(ArtError, code="tool_server_failed"):
    """An MCP server or environment failed or is late. The rollout fails and gets no reward, not even 0."""

    transient = True


class StorageError(ArtError, code="storage_error"):
    """Reading or writing the data directory failed."""


class KeysUnavailableError(StorageError, code="keys_unavailable"):
    """The server cannot read its file of API keys, so it knows only the key that it was started with."""


class DirectoryGoneError(StorageError, code="data_directory_gone"):
    """The data directory, or its lock or database, was removed or replaced while its server was running."""


class DiskFullError(StorageError, code="disk_full"):
    """There is no space left on the disk."""


class CorruptCheckpointError(StorageError, code="corrupt_checkpoint"):
    """A file of a checkpoint is missing or damaged."""


class ProcessError(ArtError, code="process_unavailable"):
    """An engine, trainer or server process has ended or does not answer in time."""

    transient = True


class MachineError(ArtError, code="machine_refused"):
    """Another machine refuses a connection over ssh, or ART cannot be installed or started there."""


class UnreachableError(MachineError, code="machine_unreachable"):
    """Another machine cannot be reached over ssh now, or a command there did not end in time."""

    transient = True


def error_from_code(code: str, message: str, *, param: str | None = None) -> ArtError:
    """Make the error whose `code` a server sent; an unknown code gives a plain `ArtError` with the same message."""
    return _BY_CODE.get(code, ArtError)(message, param=param)
