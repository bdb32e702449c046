"""Errors as HTTP answers: one table from error class to status, and OpenAI's error body."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from art import errors
from art.protocol.dialects.chat_completions import invalid_request

logger = logging.getLogger(__name__)

STATUS: dict[type[errors.ArtError], int] = {
    errors.ConfigError: 400,
    errors.RequestError: 400,
    errors.AuthenticationError: 401,
    errors.PermissionDeniedError: 403,
    errors.NotFoundError: 404,
    errors.ConflictError: 409,
    errors.RequestTimeoutError: 408,
    errors.PayloadTooLargeError: 413,
    errors.UnsupportedMediaError: 415,
    errors.OverloadedError: 429,
    errors.QuotaError: 429,
    errors.TrajectoryError: 422,
    errors.TrainingError: 500,
    errors.JobCancelledError: 409,
    errors.PublishError: 500,
    errors.StorageError: 500,
    errors.DiskFullError: 507,
    errors.KeysUnavailableError: 503,
    errors.DirectoryGoneError: 503,
    errors.ProcessError: 503,
    errors.MachineError: 502,
    errors.UnreachableError: 503,
    errors.ArtError: 500,
}
"""The nearest base class in this table decides the status of an error. Clients turn the `code` in the body back into
the class, with `art.errors.error_from_code`."""

METHOD_NOT_ALLOWED = 405

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's `type` of an error by its status. Others are "invalid_request_error" or, from 500 on, "server_error"."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that is being answered. The log has internal errors under it."""
ErrorBody = Callable[[errors.ArtError], dict[str, Any]]
"""Function that makes the JSON body of an error."""


def public_error(error: BaseException) -> errors.ArtError:
    """Return the error that a client may see. An error from outside ART shows only an id, under which it is logged."""
    if isinstance(error, ValidationError):
        return invalid_request(error)
    if getattr(error, "errno", getattr(error.__cause__, "errno", None)) in (errno.EMFILE, errno.ENFILE):
        logger.error("no file can be opened: %s. Raise the limit of open files (`ulimit -n`, LimitNOFILE)", error)
        return errors.ProcessError("the server has too many open files now; repeat the request in a moment")
    if isinstance(error, errors.ArtError):
        return error
    error_id = REQUEST_ID.get() or os.urandom(6).hex()
    logger.error("error %s", error_id, exc_info=error)
    return errors.ArtError(f"internal error {error_id}; the server's log has the details under this id")


def failure(error: BaseException, body: ErrorBody | None = None) -> Response:
    """Make the HTTP answer to an error. By default its body has OpenAI's form."""
    error = public_error(error)
    # Without this header the OpenAI client silently retries 409 and every 5xx for minutes.
    headers = {"x-should-retry": "true" if error.transient else "false"}
    if isinstance(error, errors.OverloadedError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.RequestTimeoutError):
        headers["connection"] = "close"  # the rest of the body may still arrive
    return Response(orjson.dumps((body or error_body)(error)), _status(error), headers, "application/json")


def error_body(error: errors.ArtError) -> dict[str, Any]:
    """Make the JSON body of an error in OpenAI's form."""
    status = _status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _status(error: errors.ArtError) -> int:
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)
