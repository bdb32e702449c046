"""A strict OTLP receiver on a free port: it refuses what the specification refuses, and keeps the spans it accepted.

It can also be told to answer a number of requests in other ways first: busy, away, with a partial success.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

MAX_BODY = 4 * 2**20
"""The default of the OpenTelemetry Collector for gRPC; some services have it for HTTP too."""


@dataclass(frozen=True)
class Answer:
    """What the receiver answers in place of accepting a request."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    accepts: bool = False
    """Whether the spans count as accepted all the same."""


def partial_success(rejected: int, message: str) -> Answer:
    answer = ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(rejected_spans=rejected, error_message=message)
    )
    return Answer(200, {"Content-Type": "application/x-protobuf"}, answer.SerializeToString(), accepts=True)


@dataclass
class ReceivedSpan:
    """A span with its attributes as plain values."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    status: int
    resource: dict[str, Any]


class Receiver:
    """What a receiver was sent, and how it answers."""

    def __init__(self, required: Mapping[str, str]) -> None:
        self.required = {key.lower(): value for key, value in required.items()}
        self.answers: list[Answer] = []
        """Answers to the next requests; after them requests are accepted."""
        self.requests: list[tuple[str, dict[str, str], int]] = []
        """Path, headers and size of each request, refused ones included."""
        self.spans: list[ReceivedSpan] = []
        self.url = ""

    @property
    def rollouts(self) -> list[ReceivedSpan]:
        return [span for span in self.spans if not span.parent_id]

    def answer(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Judge one request, as a receiver that follows the specification to the letter."""
        self.requests.append((path, dict(headers), len(body)))
        wrong = self._wrong_request(path, headers, body)
        if wrong is not None:
            return wrong
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        try:
            parsed = ExportTraceServiceRequest()
            parsed.ParseFromString(body)
        except DecodeError as error:
            return Answer(400, body=str(error).encode())
        is_probe = not parsed.resource_spans
        planned = self.answers.pop(0) if self.answers and not is_probe else None
        if planned is not None and not planned.accepts:
            return planned
        spans = list(_spans(parsed))
        if (why := self._wrong_spans(spans)) is not None:
            return Answer(400, body=why.encode())
        self.spans += spans
        return planned or Answer(200, {"Content-Type": "application/x-protobuf"})

    def _wrong_request(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer | None:
        if path != "/v1/traces":
            return Answer(404, body=f"no {path}".encode())
        if any(headers.get(key) != value for key, value in self.required.items()):
            return Answer(401, body=b"a header is missing")
        if headers.get("content-type") != "application/x-protobuf":
            return Answer(415)
        if headers.get("content-encoding", "identity") not in ("gzip", "identity"):
            return Answer(415)
        return Answer(413) if len(body) > MAX_BODY else None

    def _wrong_spans(self, spans: list[ReceivedSpan]) -> str | None:
        known = {(span.trace_id, span.span_id) for span in spans}
        if len(known) < len(spans):
            return "a span is there twice"
        known |= {(span.trace_id, span.span_id) for span in self.spans if not span.parent_id}
        for span in spans:
            if len(span.trace_id) != 32 or not int(span.trace_id, 16) or len(span.span_id) != 16:
                return "an id is not valid"
            if span.parent_id and (span.trace_id, span.parent_id) not in known:
                return "a parent is missing"
            if not span.name or span.kind not in (1, 3) or not 0 < span.start <= span.end:
                return f"{span.name}: kind {span.kind}, {span.start} to {span.end}"
        return None


def _spans(request: Any) -> Iterator[ReceivedSpan]:
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes)
        for span in (span for scope in group.scope_spans for span in scope.spans):
            events = [(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events]
            yield ReceivedSpan(
                span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name, span.kind,
                span.start_time_unix_nano, span.end_time_unix_nano, _attributes(span.attributes), events,
                span.status.code, resource,
            )  # fmt: skip


def _attributes(pairs: Any) -> dict[str, Any]:
    values = {pair.key: _value(pair.value) for pair in pairs}
    assert len(values) == len(pairs), "an attribute is there twice"
    return values


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def receiver(port: int = 0, **required: str) -> Iterator[Receiver]:
    """Serve a receiver on a loopback port until the block ends. `required` are headers that requests must have."""
    state = Receiver({key.replace("_", "-"): value for key, value in required.items()})
    with serve(state.answer, port) as url:
        state.url = url
        yield state


@contextmanager
def serve(answer: Any, port: int = 0) -> Iterator[str]:
    """Serve POST requests by `answer(path, headers, body)` on a loopback port. Yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # HTTP/1.0: each connection ends with its answer, so none outlives the server
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            given = answer(self.path, {key.lower(): value for key, value in self.headers.items()}, body)
            self.send_response(given.status)
            for key, value in {**given.headers, "Content-Length": str(len(given.body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(given.body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
