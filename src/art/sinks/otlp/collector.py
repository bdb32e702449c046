"""Sends bodies to a collector by HTTP, and tells what may be repeated from what may not."""

from __future__ import annotations

import gzip
import math
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import httpx2

from art.errors import ConfigError, OverloadedError
from art.sinks.otlp.settings import OtlpSettings
from art.sinks.sink import Refused

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
_BUSY = frozenset({429, 502, 503, 504})
"""Statuses after which OTLP tells clients to repeat a request."""
_BAD_BODY = frozenset({400, 411, 413, 415, 422})
"""Statuses that are about the body. Repeating it is useless."""
_BAD_REQUEST = 400
_MAX_SHOWN = 300
_MAX_PAUSE_S = 300.0


class BadBody(Refused):
    """A collector refused the body of a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Collector:
    """An HTTP connection to a collector."""

    def __init__(self, settings: OtlpSettings, transport: httpx2.BaseTransport | None = None) -> None:
        """
        Args:
            transport: replaces the network, in tests.
        """
        try:
            verify = ssl.create_default_context(cafile=settings.certificate)
        except OSError as error:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_CERTIFICATE is {settings.certificate!r}, which cannot be read: {error}",
                param="report_metrics",
            ) from error
        self._is_compressed = settings.is_compressed
        self._client = httpx2.Client(timeout=settings.timeout_s, verify=verify, transport=transport)

    def post(self, url: str, body: bytes, headers: Mapping[str, str], content_type: str = PROTOBUF) -> bytes:
        """Send a body and return the body of the answer.

        Raises:
            OverloadedError: the collector is busy; with the pause that it asks for.
            BadBody: the collector will never accept this body.
            ConnectionError: it is not there, or does not let us in. Someone may change that, so it is repeated.
        """
        sent = dict(headers) | {"content-type": content_type}
        if self._is_compressed and content_type == PROTOBUF:
            sent["content-encoding"] = "gzip"
            body = gzip.compress(body, compresslevel=1, mtime=0)
        try:
            answer = self._client.post(url, content=body, headers=sent)
        except httpx2.HTTPError as error:
            raise ConnectionError(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
        if answer.is_success:
            return answer.content
        said = f"{url} answered {answer.status_code}{_text(answer)}"
        if answer.status_code in _BUSY:
            busy = OverloadedError(said)
            busy.retry_after_s = _retry_after(answer.headers.get("retry-after"))
            raise busy
        if answer.status_code in _BAD_BODY:
            raise BadBody(said, answer.status_code)
        raise ConnectionError(said)

    def check(self, url: str, body: bytes, headers: Mapping[str, str], *, name: str) -> None:
        """Send a request without spans, to find a wrong address or key before training begins.

        A collector that is busy, or calls the empty request a bad one (as MLflow does), is there and knows us.

        Raises:
            ConfigError: it is not there, or does not let us in.
        """
        try:
            self.post(url, body, headers)
        except OverloadedError:
            return
        except (BadBody, ConnectionError) as error:
            if isinstance(error, BadBody) and error.status == _BAD_REQUEST:
                return
            raise ConfigError(
                f"the sink `{name}` cannot start: {error}. Check the address and the key, or leave {name!r} out",
                param="report_metrics",
            ) from error

    def close(self) -> None:
        self._client.close()


def _text(answer: httpx2.Response) -> str:
    """The beginning of a refusal, in characters that a log can show."""
    shown = "".join(c if c.isprintable() else " " for c in answer.content[:4000].decode("utf-8", "replace"))
    shown = " ".join(shown.split())[:_MAX_SHOWN]
    return f": {shown}" if shown else ""


def _retry_after(value: str | None) -> float:
    """Seconds that a collector asks to wait: a number or a date; 0 if it asks for nothing that can be read."""
    if not value:
        return 0.0
    try:
        pause_s = float(value)
    except ValueError:
        try:
            pause_s = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(pause_s, 0.0), _MAX_PAUSE_S) if math.isfinite(pause_s) else 0.0
