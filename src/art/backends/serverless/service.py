"""`Service`: the calls of the Serverless Training API, with what may be repeated and what may not.

GET, DELETE, register    the same result however often they arrive: repeated until there is an answer, which is JSON and
                         no page of a proxy. What a repeated DELETE does not find any more is deleted
create a job, log        no idempotency key: repeated only if the service cannot have taken the request, that is,
                         after a connection that was never made, and after a 429, which refuses it
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, TypeAdapter, ValidationError

from art.backends.serverless.wire import (
    Checkpoint,
    CheckpointPage,
    CreatedJob,
    CreateModel,
    CreateRlJob,
    CreateSftJob,
    DeleteSteps,
    EventPage,
    LogGroups,
    ServiceModel,
)
from art.backoff import Backoff, Failure, call_with_retries, retry_after_s
from art.client.http import LostAnswerError
from art.client.loops import PerLoop
from art.client.waiting import announce_wait
from art.errors import (
    ArtError,
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    PermissionDeniedError,
    ProcessError,
    TrajectoryError,
)

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=BaseModel)

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 120.0
PAGE_SIZE = 100
"""Items of a page: the most that the service gives."""
_BY_STATUS: dict[int, type[ArtError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: PayloadTooLargeError,
    422: InvalidRequestError,
    429: OverloadedError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long `ServerlessBackend` waits for the service, in seconds."""

    poll_s: float = 1.0
    """Time between two questions about a job."""
    answer_s: float = 300.0
    """Time after which a call without any usable answer fails."""
    checkpoint_s: float = 600.0
    """Time in which the checkpoint of a job that has ended must be listed."""
    lost_job_s: float = 1800.0
    """Time in which the checkpoint of a job must be listed, if the answer to its submission was lost."""
    job_s: float = 24 * 3600.0
    """Time that a job may take, its time in the service's queue included."""


class _TryAgainError(Exception):
    """A request that may succeed a little later."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.retry_after_s = getattr(cause, "retry_after_s", None)


class Service:
    """Connections to one address of the service. Use it from any event loop, and close it in each."""

    def __init__(self, base_url: str, api_key: str, patience: Patience) -> None:
        """
        Args:
            base_url: address with `/v1` at its end.
        """
        self.base_url = base_url
        self._api_key = api_key
        self._patience = patience
        self._http: PerLoop[httpx2.AsyncClient] = PerLoop(httpx2.AsyncClient.aclose)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._http.close()

    async def create_model(self, request: CreateModel) -> ServiceModel:
        return _read(ServiceModel, await self._repeat("POST", "/preview/models", request))

    async def base_models(self) -> list[str]:
        """List the models that the service trains, by their hub ids."""
        content = await self._repeat("GET", "/preview/base-models")
        try:
            return TypeAdapter(list[str]).validate_json(content)
        except ValidationError as error:
            raise ArtError(f"the service gave no list of base models: {error}") from error

    async def delete_model(self, model_id: str) -> None:
        """Delete a model. One that is gone already, such as after an answer that was lost, is no error."""
        with contextlib.suppress(NotFoundError):
            await self._repeat("DELETE", _model_path(model_id))

    async def checkpoints(self, model_id: str) -> list[Checkpoint]:
        """List all checkpoints of a model by their steps."""
        checkpoints: list[Checkpoint] = []
        params: dict[str, str] = {"limit": str(PAGE_SIZE), "order": "asc"}
        while True:
            page = _read(CheckpointPage, await self._repeat("GET", _model_path(model_id, "checkpoints"), params=params))
            if "after" in params and page.data and page.data[0] in checkpoints:
                raise ArtError(f"the service gave the same page of checkpoints after {params['after']} as before it")
            checkpoints += page.data
            if not (page.has_more and page.data):
                return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
            params["after"] = page.data[-1].id

    async def newest_checkpoint(self, model_id: str) -> Checkpoint | None:
        params = {"limit": "1", "order": "desc"}
        page = _read(CheckpointPage, await self._repeat("GET", _model_path(model_id, "checkpoints"), params=params))
        return page.data[0] if page.data else None

    async def delete_checkpoints(self, model_id: str, steps: list[int]) -> None:
        """Delete checkpoints. Those that are gone already, such as after an answer that was lost, are no error."""
        await self._repeat("DELETE", _model_path(model_id, "checkpoints"), DeleteSteps(steps=steps))

    async def create_job(self, request: CreateRlJob | CreateSftJob) -> str:
        """Send a training job, once. Returns its id.

        Raises:
            LostAnswerError: there was no usable answer, so the service may have taken the job.
            ArtError: the service refused the job, or was never reached.
        """
        path = "/preview/training-jobs" if isinstance(request, CreateRlJob) else "/preview/sft-training-jobs"
        content = await self._send_once(path, request)
        try:
            return CreatedJob.model_validate_json(content).id
        except ValidationError as error:
            raise LostAnswerError(f"POST {path} was answered without the id of the job") from error

    async def events(self, job_id: str, after: str | None) -> EventPage:
        """Return the next page of a job's events, after the event with the id `after`."""
        params = {"limit": str(PAGE_SIZE)} | ({} if after is None else {"after": after})
        path = f"/preview/training-jobs/{quote(job_id, safe='')}/events"
        return _read(EventPage, await self._repeat("GET", path, params=params))

    async def log(self, request: LogGroups) -> None:
        """Send groups to the run of a model, once. Errors are those of `create_job`."""
        await self._send_once(_model_path(request.model_id, "log"), request)

    async def _repeat(
        self, method: str, path: str, body: BaseModel | None = None, *, params: Mapping[str, str] | None = None
    ) -> bytes:
        """Send a request again until it is answered.

        Raises:
            ProcessError: there was no usable answer for `Patience.answer_s` seconds.
            ArtError: the service refused.
        """
        what, content = f"{method} {path}", _encode(body)

        async def send() -> bytes:
            try:
                response = await self._send(method, path, content, params)
            except httpx2.RequestError as lost:
                raise _TryAgainError(lost) from lost
            if response.is_success and (method == "DELETE" or _is_json(response)):
                return response.content
            error = _error_of(response, what)
            raise _TryAgainError(error) if _is_passing(response) or response.is_success else error

        return await self._until_answered(send, what)

    async def _send_once(self, path: str, body: BaseModel) -> bytes:
        """Send a request that must not arrive twice. Errors are those of `create_job`."""
        what, content = f"POST {path}", _encode(body)

        async def send() -> bytes:
            try:
                response = await self._send("POST", path, content, None)
            except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as never_sent:
                raise _TryAgainError(never_sent) from never_sent
            except httpx2.RequestError as lost:
                raise LostAnswerError(f"{what} got no answer: {type(lost).__name__}: {lost}") from lost
            if response.is_success:
                return response.content
            error = _error_of(response, what)
            if response.status_code == 429:
                raise _TryAgainError(error)
            raise LostAnswerError(str(error)) if _is_passing(response) else error

        return await self._until_answered(send, what)

    async def _until_answered(self, send: Callable[[], Awaitable[bytes]], what: str) -> bytes:
        """Call `send` again while it raises `_TryAgainError`, with pauses that double or that the service asks for."""

        def before_retry(failure: Failure) -> None:
            assert isinstance(failure.error, _TryAgainError)
            error, tried_s = failure.error.cause, failure.lasting_s
            if tried_s + failure.pause_s > self._patience.answer_s:
                if isinstance(error, OverloadedError):
                    too_busy = OverloadedError(
                        f"{error}. It is busy: it asks to wait for {error.retry_after_s:.0f} s more, after "
                        f"{tried_s:.0f} s of tries, and `Patience.answer_s` is {self._patience.answer_s:g}"
                    )
                    too_busy.retry_after_s = error.retry_after_s
                    raise too_busy from error
                raise ProcessError(
                    f"{what}: {self.base_url} gave no usable answer for {tried_s:.0f} s (last: {type(error).__name__}: "
                    f"{error}). Is the address right, and is the service up?"
                ) from error
            level = logging.WARNING if failure.number == 4 else logging.DEBUG
            logger.log(level, "%s: %s; trying again in %.1f s", what, error, failure.pause_s)

        first_s = 0.5 * min(self._patience.poll_s, 1.0)
        backoff = Backoff(first_s=first_s, longest_s=60 * first_s, longest_asked_s=math.inf)
        with announce_wait(f"an answer to {what} of {self.base_url}"):
            return await call_with_retries(send, backoff, before_retry, _TryAgainError)

    async def _send(
        self, method: str, path: str, content: bytes | None, params: Mapping[str, str] | None
    ) -> httpx2.Response:
        return await self._http.get(self._open).request(
            method, self.base_url + path, params=params, content=content,
            headers={"Content-Type": "application/json"} if content is not None else None,
        )  # fmt: skip

    def _open(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._api_key}"},
            timeout=httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )


def _model_path(model_id: str, rest: str = "") -> str:
    path = f"/preview/models/{quote(model_id, safe='')}"
    return f"{path}/{rest}" if rest else path


def _encode(body: BaseModel | None) -> bytes | None:
    try:
        return None if body is None else body.model_dump_json().encode()
    except ValueError as error:  # half a character, such as "\ud83d" alone
        raise TrajectoryError(f"the trajectories cannot be sent as JSON: {error}. Clean their texts first") from error


def _read(kind: type[A], content: bytes) -> A:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ArtError(
            f"the service gave no {kind.__name__}: {error}. Is the address that of Serverless Training, and is this "
            "version of ART still right for it?"
        ) from error


def _is_json(response: httpx2.Response) -> bool:
    try:
        response.json()
    except ValueError:
        return False
    return True


def _is_passing(response: httpx2.Response) -> bool:
    """Whether the same request may succeed a little later."""
    return response.status_code in (408, 429) or response.status_code >= 500


def _error_of(response: httpx2.Response, what: str) -> ArtError:
    """The error in an answer, with the fields that the service names."""
    kind = _BY_STATUS.get(response.status_code, ProcessError if response.status_code >= 500 else ArtError)
    error = kind(f"the service answered {what} with {response.status_code}: {_complaint(response)}")
    if isinstance(error, OverloadedError):
        error.retry_after_s = retry_after_s(response.headers) or 0.0
    return error


def _complaint(response: httpx2.Response) -> str:
    """What an answer complains about: FastAPI's list of fields, a message, or the beginning of the body."""
    try:
        body = response.json()
        detail = body.get("detail", body.get("error", body))
        if isinstance(detail, list):
            return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in detail)
        return str(detail.get("message", detail) if isinstance(detail, dict) else detail)
    except (ValueError, AttributeError, KeyError, TypeError):
        return repr(response.text[:300])
