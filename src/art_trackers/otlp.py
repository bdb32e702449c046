"""`OtlpSink` sends each rollout as a trace to any collector that speaks OTLP over HTTP, by OpenTelemetry's exporter.

The exporter reads OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ..._HEADERS, ..._TIMEOUT and so on), and
repeats a request while the collector is busy. docs/trackers.md has the values for Langfuse, Weave, Phoenix and
MLflow.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from art.errors import ConfigError, OverloadedError
from art.sinks import LoggedGroups, Refused, Row, Run, Sink

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from art.trajectory import PydanticException
    from art_trackers.otlp_spans import RolloutPlace

logger = logging.getLogger(__name__)

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CONTENT = {
    "": False, "false": False, "no_content": False, "event_only": False,
    "true": True, "span_only": True, "span_and_event": True,
}  # fmt: skip
"""Values of the variable in OpenTelemetry's GenAI instrumentations. `event_only` keeps texts out of spans."""
MAX_REQUEST_BYTES = 3 * 2**20
"""Size of a request before compression, about. Langfuse takes 5 MB, collectors 4 MB and more."""
_BAD_BODY = frozenset({400, 411, 413, 415, 422})
"""Statuses that are about the body. Repeating it is useless."""
_BUSY = frozenset({429, 502, 503, 504})
_BAD_REQUEST = 400
_MAX_SHOWN = 300


class OtlpSink(Sink):
    """Sends rollouts as traces by OpenTelemetry's GenAI conventions.

    Example: with the texts of messages and tools
        model = art.TrainableModel(..., report_metrics=[lambda: OtlpSink(content=True)])
    """

    name = "otlp"
    takes_groups = True
    package, extra = "opentelemetry.exporter.otlp.proto.http", "otlp"
    environment = ("OTEL_EXPORTER_OTLP_ENDPOINT|OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",)
    switched_off_by = (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none"))

    def __init__(self, *, content: bool | None = None) -> None:
        """
        Args:
            content: whether texts are sent (messages, tools, judges' explanations, metadata). By default the variable
                OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says it, and without that none are sent.
        """
        self._content = content
        self._exporter: Any = None
        self._answer: Any = None

    def start(self, run: Run) -> None:
        try:
            import requests
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource

            from art_trackers.otlp_spans import SpanSettings
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the sink `{self.name}` needs the package {error.name!r}: "
                "pip install 'agent-reinforcement-trainer[otlp]'",
                param="report_metrics",
            ) from error
        _check_address()
        self._run = run
        resource = Resource({"service.name": "art"}).merge(OTELResourceDetector().detect())
        content = read_content(os.environ) if self._content is None else self._content
        self._settings = SpanSettings(content=content, resource=resource)
        session = requests.Session()
        session.hooks["response"].append(lambda answer, **_: setattr(self, "_answer", answer))
        self._exporter = OTLPSpanExporter(session=session)
        try:
            self._export([])  # a request without spans finds a wrong address or key before training begins
        except OverloadedError:
            pass
        except (Refused, OSError) as error:
            # A collector that calls the empty request a bad one (as MLflow does) is there and knows us.
            if self._answer is None or self._answer.status_code != _BAD_REQUEST:
                raise ConfigError(
                    f"the sink `{self.name}` cannot start: {error}. Check the address and the key, or leave "
                    f"{self.name!r} out",
                    param="report_metrics",
                ) from error

    def metrics(self, row: Row) -> None:
        """Take a row without sending it: a clock is the wrong axis for a training curve."""

    def groups(self, groups: LoggedGroups) -> None:
        reasons: list[str] = []
        for spans in self._requests(groups):
            try:
                self._export(spans)
            except Refused as error:
                reasons.append(str(error))
        if reasons:
            raise Refused("; ".join(dict.fromkeys(reasons)))

    def close(self, timeout_s: float) -> None:
        if self._exporter is not None:
            self._exporter.shutdown()

    def _requests(self, groups: LoggedGroups) -> Iterator[list[ReadableSpan]]:
        """Yield the spans of each request, the same ones at each call. A trace may lie in two requests."""
        spans: list[ReadableSpan] = []
        num_bytes = 0
        for span in self._spans(groups):
            # About: its texts, and some bytes for each attribute.
            attributes = [span.attributes or {}, *(event.attributes or {} for event in span.events)]
            texts = (f"{key}{value}" for each in attributes for key, value in each.items())
            size = 100 + sum(len(text.encode()) + 12 for text in texts)
            if spans and num_bytes + size > MAX_REQUEST_BYTES:
                yield spans
                spans, num_bytes = [], 0
            spans.append(span)
            num_bytes += size
        if spans:
            yield spans

    def _spans(self, groups: LoggedGroups) -> Iterator[ReadableSpan]:
        """Make one trace after the other: with texts, those of a whole delivery would fill the memory."""
        from art_trackers.otlp_spans import RolloutPlace, failed_span, rollout_spans

        failures: list[tuple[PydanticException, RolloutPlace]] = []
        ended_ns = 0
        for number, group in enumerate(groups.groups, start=groups.first):
            places = [
                RolloutPlace(self._run, groups.split, groups.step, number, index)
                for index in range(len(group.trajectories) + len(group.exceptions))
            ]
            for trajectory, place in zip(group.trajectories, places, strict=False):
                spans = rollout_spans(trajectory, place, self._settings)
                ended_ns = max(ended_ns, spans[0].end_time or 0)
                yield from spans
            failures += zip(group.exceptions, places[len(group.trajectories) :], strict=True)
        # The log does not say when a rollout failed. The others of the delivery ran at about the same time.
        at = ended_ns / 1e9 or time.time()
        for failure, place in failures:
            yield failed_span(failure, place, at, self._settings)

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        """Send a request. The exporter only says whether it failed, so the collector's answer says why.

        Raises:
            Refused: the collector will never accept this.
            OverloadedError: it is busy; with the pause that it asks for.
            ConnectionError: it is not there, or does not let us in. Someone may change that, so it is repeated.
        """
        self._answer = None
        self._exporter.export(spans)
        answer = self._answer
        if answer is None:
            raise ConnectionError(f"{self._exporter._endpoint} cannot be reached")
        if answer.ok and not answer.is_redirect:
            return
        text = "".join(c if c.isprintable() else " " for c in answer.text[:4000])
        said = f"{answer.url} answered {answer.status_code}: {' '.join(text.split())[:_MAX_SHOWN]}"
        if answer.status_code in _BAD_BODY:
            raise Refused(said)
        if answer.status_code in _BUSY:
            busy = OverloadedError(said)
            asked = answer.headers.get("retry-after", "")
            busy.retry_after_s = float(asked) if asked.isdecimal() else 0.0
            raise busy
        raise ConnectionError(said)


def read_content(environment: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variable asks for the texts of messages and tools."""
    value = environment.get(CONTENT_VARIABLE, "").strip().lower()
    if value not in _CONTENT:
        known = ", ".join(filter(None, _CONTENT))
        logger.warning("%s is %r; expected one of %s. No texts are sent", CONTENT_VARIABLE, value, known)
    return _CONTENT.get(value, False)


def _check_address() -> None:
    """
    Raises:
        ConfigError: a variable is missing, or says something that this sink cannot do.
    """

    def read(kind: str, default: str) -> tuple[str, str]:
        names = (f"OTEL_EXPORTER_OTLP_TRACES_{kind}", f"OTEL_EXPORTER_OTLP_{kind}")
        name = next((name for name in names if os.environ.get(name)), names[1])
        return name, os.environ.get(name, default)

    name, address = read("ENDPOINT", "")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"the sink `otlp` needs an address: {name} is {address!r}; expected one like http://localhost:4318",
            param="report_metrics",
        )
    name, protocol = read("PROTOCOL", "http/protobuf")
    if protocol != "http/protobuf":
        raise ConfigError(
            f"{name} is {protocol!r}, but the sink `otlp` sends http/protobuf only: set it to http/protobuf, and the "
            "endpoint to the collector's HTTP address (port 4318 by default)",
            param="report_metrics",
        )
