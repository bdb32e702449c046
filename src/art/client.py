"""The HTTP client of an ART server: one typed method per endpoint.

A server may be restarted at any time. Calls that get no answer are repeated until a deadline, and a training job is
submitted under an id that the server trains at most once, so that the same call goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from art.errors import (
    ArtError,
    AuthenticationError,
    ConfigError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    PermissionDeniedError,
    ProcessError,
    error_from_code,
)
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.training import (
    DeleteCheckpointsRequest,
    DeleteCheckpointsResponse,
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)
from art.utils.loops import PerLoop
from art.utils.waiting import announce_wait

logger = logging.getLogger(__name__)

W = TypeVar("W", bound=BaseModel)
OnRetry = Callable[[Exception, float], Awaitable[None]]

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
REGISTER_TIMEOUT_S = 900.0
"""The first registration of a base model downloads it and starts its engine."""
UNREACHABLE_DEADLINE_S = 300.0
"""How long a call goes on without any answer from the server."""
JOB_DEADLINE_S = 24 * 3600.0
POLL_S = 20.0
_QUIET_RETRIES = 5
"""About two seconds, which a short hiccup may take without a warning."""
_TRY_AGAIN = {502, 503, 504}
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class ArtClient:
    """Talks to one server. Use it from any event loop; close it in each."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        unreachable_deadline_s: float = UNREACHABLE_DEADLINE_S,
        on_retry: OnRetry | None = None,
    ) -> None:
        """
        Args:
            base_url: of the server, without `/v1`.
            transport: replaces the network, for servers in this process.
            on_retry: awaited before a call is repeated, with the error and the seconds lost so far.
        """
        url = httpx2.URL(base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"base_url must be the address of an ART server, like http://host:5000; got {base_url!r}")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        self._transport = transport
        self._unreachable_deadline_s = unreachable_deadline_s
        self._on_retry = on_retry
        self.is_local = url.host in _LOOPBACK
        """Whether the server is on this machine, so that both see the same files."""
        self._num_closed, self._why_closed = 0, ""
        self._http: PerLoop[httpx2.AsyncClient] = PerLoop(httpx2.AsyncClient.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, why: str = "the connection was closed") -> None:
        """Close the connections of this event loop. Calls under way fail instead of looking for the server again; `why`
        is what they say."""
        self._num_closed += 1
        self._why_closed = why
        await self._http.close()

    # --- endpoints ---

    async def health(self) -> dict[str, Any]:
        return await self._json("GET", "/health")

    async def register(self, request: RegisterRequest) -> ModelStatus:
        what = f"the server to register {request.project}/{request.name} ({request.base_model})"
        return await self._typed(
            ModelStatus, "POST", "/api/models", body=request, read_timeout_s=REGISTER_TIMEOUT_S, what=what
        )

    async def preflight(self, project: str, name: str, request: PreflightRequest) -> PreflightReport:
        """What a training of the model would need, checked on the server; with a trial it takes as long as a step."""
        path, what = _model_path(project, name, "preflight"), f"the checks of {project}/{name}"
        return await self._typed(
            PreflightReport, "POST", path, body=request, read_timeout_s=REGISTER_TIMEOUT_S, what=what
        )

    async def model_status(self, project: str, name: str) -> ModelStatus:
        return await self._typed(ModelStatus, "GET", _model_path(project, name))

    async def list_checkpoints(self, project: str, name: str) -> list[int]:
        return [int(step) for step in (await self._json("GET", _model_path(project, name, "checkpoints")))["steps"]]

    async def delete_checkpoints(
        self, project: str, name: str, request: DeleteCheckpointsRequest
    ) -> DeleteCheckpointsResponse:
        path = _model_path(project, name, "checkpoints/delete")
        return await self._typed(DeleteCheckpointsResponse, "POST", path, body=request)

    async def get_rollout(self, rollout_id: str) -> list[dict[str, Any]]:
        """The conversations recorded under a rollout's base URL, each with `messages_and_choices` and `tools`."""
        histories = (await self._json("GET", f"/api/rollouts/{quote(rollout_id, safe='')}"))["histories"]
        return list(histories)

    async def submit_train(self, project: str, name: str, request: TrainRequest) -> JobStatus:
        return await self._typed(JobStatus, "POST", _model_path(project, name, "train"), body=request)

    async def submit_train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus:
        return await self._typed(JobStatus, "POST", _model_path(project, name, "train_sft"), body=request)

    async def job_status(self, job_id: str, *, wait_s: float = 0.0) -> JobStatus:
        """The state of a job; with `wait_s` the answer comes when it changes, or after so long."""
        path, params = f"/api/jobs/{quote(job_id, safe='')}", {"wait_s": f"{wait_s:g}"}
        return await self._typed(JobStatus, "GET", path, params=params, read_timeout_s=wait_s + READ_TIMEOUT_S)

    # --- jobs ---

    async def train(self, project: str, name: str, request: TrainRequest) -> JobStatus:
        """Submit a training step and wait for its end.

        Raises:
            ArtError: the error that the job ended with.
            ProcessError: it took longer than `JOB_DEADLINE_S`.
        """
        what = f"training of {project}/{name}"
        return await self._finish(lambda: self.submit_train(project, name, request), what)

    async def train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus:
        """Like `train`, for supervised fine-tuning."""
        what = f"supervised fine-tuning of {project}/{name}"
        return await self._finish(lambda: self.submit_train_sft(project, name, request), what)

    async def _finish(self, submit: Callable[[], Awaitable[JobStatus]], what: str) -> JobStatus:
        deadline = time.monotonic() + JOB_DEADLINE_S
        with announce_wait(what):
            status = await submit()
            while status.state in ("queued", "running"):
                if time.monotonic() > deadline:
                    raise ProcessError(f"gave up on {what}: job {status.job_id} is still {status.state}")
                try:
                    status = await self.job_status(status.job_id, wait_s=POLL_S)
                except NotFoundError:
                    # The server went down before it had written the job. Under its old id this cannot train twice.
                    logger.warning("the server does not know job %s (%s): submitting it again", status.job_id, what)
                    status = await submit()
        if status.state == "failed":
            if status.error is None:
                raise ArtError(f"{what} failed, and the server gave no reason")
            raise error_from_code(status.error.code, status.error.message, param=status.error.param)
        return status

    # --- requests ---

    async def _typed(self, kind: type[W], method: str, path: str, **options: Any) -> W:
        content = await self._request(method, path, **options)
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            raise ArtError(
                f"{method} {path} gave no {kind.__name__}; are server and client of the same version? {error}"
            ) from error

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        content = await self._request(method, path, **options)
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise ArtError(f"{method} {self.base_url}{path} gave no JSON; is this an ART server?") from error
        if not isinstance(answer, dict):
            raise ArtError(f"{method} {self.base_url}{path} gave no JSON object; is this an ART server?")
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: Mapping[str, str] | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
        what: str | None = None,
    ) -> bytes:
        """The body of a successful answer. Every call is safe to repeat, so lost ones are repeated.

        Args:
            what: is waited for, when it takes long.
        """
        content = None if body is None else body.model_dump_json().encode()
        timeout = httpx2.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S)
        lost_since: float | None = None
        attempt, num_closed = 0, self._num_closed
        with announce_wait(what or f"an answer to {method} {self.base_url}{path}"):
            while True:
                sent = time.monotonic()
                try:
                    http = self._http.get(self._open)
                    response = await http.request(
                        method, path, content=content, params=params, timeout=timeout,
                        headers={"Content-Type": "application/json"} if content else None,
                    )  # fmt: skip
                    if response.is_success:
                        return response.content
                    error: Exception = _error_of(response)
                    if not _may_try_again(response, error):
                        raise error
                except (httpx2.TransportError, RuntimeError) as lost:
                    if self._num_closed != num_closed:
                        raise ProcessError(f"{method} {path} got no answer: {self._why_closed}") from lost
                    if isinstance(lost, RuntimeError):
                        raise
                    error = lost
                lost_since = sent if lost_since is None else lost_since
                await self._before_retry(error, attempt, time.monotonic() - lost_since, f"{method} {path}")
                attempt += 1

    async def _before_retry(self, error: Exception, attempt: int, lost_s: float, what: str) -> None:
        if lost_s > self._unreachable_deadline_s:
            raise ProcessError(
                f"{what}: the server at {self.base_url} gave no answer for {lost_s:.0f} s "
                f"(last: {type(error).__name__}: {error}). Is it running? Its log says more"
            ) from error
        level = logging.WARNING if attempt == _QUIET_RETRIES else logging.DEBUG
        limit_s = self._unreachable_deadline_s
        logger.log(level, "%s got no answer (%r): trying again for up to %.0f s", what, error, limit_s)
        if self._on_retry is not None:
            await self._on_retry(error, lost_s)
        delay_s = getattr(error, "retry_after_s", min(0.05 * 2**attempt, 2.0))
        await asyncio.sleep(delay_s * random.uniform(0.75, 1.25))

    def _open(self) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx2.AsyncClient(
            base_url=self.base_url, headers=headers, transport=self._transport, trust_env=not self.is_local
        )


def _model_path(project: str, name: str, rest: str = "") -> str:
    path = f"/api/models/{quote(project, safe='')}/{quote(name, safe='')}"
    return f"{path}/{rest}" if rest else path


_BY_STATUS: dict[int, type[ArtError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    413: PayloadTooLargeError,
    429: OverloadedError,
}


def _may_try_again(response: httpx2.Response, error: Exception) -> bool:
    if response.headers.get("x-should-retry") == "false":
        return False  # a server that knows better: a model that cannot be loaded is no matter of time
    return response.status_code in _TRY_AGAIN or isinstance(error, OverloadedError)


def _error_of(response: httpx2.Response) -> ArtError:
    """The error that an answer stands for; by status where the body is not ours (a proxy, another server)."""
    try:
        body = response.json()["error"]
        code, message, param = body["code"], str(body["message"]), body.get("param")
        if not isinstance(code, str):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        kind = _BY_STATUS.get(response.status_code, ArtError)
        error = kind(f"{response.request.url} answered {response.status_code}: {response.text[:300]!r}")
    else:
        error = error_from_code(code, message, param=param)
    if isinstance(error, OverloadedError):
        after = response.headers.get("retry-after", "")
        error.retry_after_s = float(after) if after.replace(".", "", 1).isdigit() else error.retry_after_s
    return error
