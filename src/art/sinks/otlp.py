"""`OtlpSink` sends each rollout as a trace to any collector that speaks OTLP over HTTP, by OpenTelemetry's exporter.

The exporter reads OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ..._HEADERS, ..._TIMEOUT and so on), and
repeats a request while the collector is busy. Langfuse, Weave and Phoenix are collectors with addresses and keys in
variables of their own:

    LANGFUSE_PUBLIC_KEY=pk-lf-...  LANGFUSE_SECRET_KEY=sk-lf-...  LANGFUSE_BASE_URL=https://cloud.langfuse.com
    WANDB_API_KEY=...  WANDB_ENTITY=my-team  [WANDB_PROJECT=...]
    PHOENIX_COLLECTOR_ENDPOINT=http://localhost:6006  [PHOENIX_API_KEY=...]  [PHOENIX_PROJECT_NAME=...]
"""

from __future__ import annotations

import base64
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

from art.errors import ConfigError, OverloadedError
from art.sinks.sink import LoggedGroups, Refused, Row, Run, Sink

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from art.sinks.otlp_spans import Place, SpanSettings
    from art.trajectory import PydanticException

logger = logging.getLogger(__name__)

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CONTENT = {
    "": False, "false": False, "no_content": False, "event_only": False,
    "true": True, "span_only": True, "span_and_event": True,
}  # fmt: skip
"""Values of the variable in OpenTelemetry's GenAI instrumentations. `event_only` keeps texts out of spans."""
MAX_REQUEST_BYTES = 3 * 2**20
"""Size of a request before compression, about. Langfuse takes 5 MB, collectors 4 MB and more."""
MAX_SPANS = 1000
"""Spans of one request."""
_BAD_BODY = frozenset({400, 411, 413, 415, 422})
"""Statuses that are about the body. Repeating it is useless."""
_BUSY = frozenset({429, 502, 503, 504})
_BAD_REQUEST = 400
_MAX_SHOWN = 300
_MAX_METRIC_NAME = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A collector whose address and keys are not in OpenTelemetry's variables."""

    endpoint: str
    """Whole address of traces."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    resource: Mapping[str, str] = field(default_factory=dict)
    """Attributes of everything that is sent."""


@dataclass(slots=True)
class _Progress:
    """What was sent of one delivery, kept while the delivery is repeated after an error."""

    key: object
    num_done: int = 0
    """Requests that were accepted or refused."""
    refused_traces: set[int] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)


class OtlpSink(Sink):
    """Sends rollouts as traces by OpenTelemetry's GenAI conventions.

    Example: with the texts of messages and tools
        model = art.TrainableModel(..., report_metrics=[lambda: OtlpSink(content=True)])
    """

    name: ClassVar[str] = "otlp"
    takes_groups: ClassVar[bool] = True

    def __init__(self, *, content: bool | None = None) -> None:
        """
        Args:
            content: whether texts are sent (messages, tools, judges' explanations, metadata). By default the variable
                OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says it, and without that none are sent.
        """
        self._content = content
        self._progress = _Progress(None)
        self._exporter: Any = None

    def service(self, environment: Mapping[str, str], run: Run) -> Service | None:
        """Return where the traces of `run` go; `None` leaves it to OpenTelemetry's variables.

        Raises:
            ConfigError: a variable is missing.
        """
        names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
        variable = next((name for name in names if environment.get(name)), "")
        if not variable:
            raise ConfigError(
                "the sink `otlp` has no address: set OTEL_EXPORTER_OTLP_ENDPOINT, for example to http://localhost:4318",
                param="report_metrics",
            )
        check_url(environment[variable], variable)
        names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        protocol = next((environment[name] for name in names if environment.get(name)), "http/protobuf")
        if protocol != "http/protobuf":
            raise ConfigError(
                f"{names[1]} is {protocol!r}, but the sink `otlp` sends http/protobuf only: set "
                f"{names[0]}=http/protobuf and the collector's HTTP address (port 4318 by default)",
                param="report_metrics",
            )
        return None

    def root_attributes(self, place: Place) -> Mapping[str, Any]:
        """Return further attributes of a rollout's first span, for services that read names of their own."""
        return {}

    def start(self, run: Run) -> None:
        try:
            import requests
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource

            from art.sinks.otlp_spans import SpanSettings
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the sink `{self.name}` needs the package {error.name!r}: "
                "pip install 'agent-reinforcement-trainer[otlp]'",
                param="report_metrics",
            ) from error
        self._run = run
        service = self.service(os.environ, run)
        attributes = {"service.name": "art"} if service is None else {"service.name": "art", **service.resource}
        self._resource = Resource(attributes).merge(OTELResourceDetector().detect())
        content = read_content(os.environ) if self._content is None else self._content
        self._settings = SpanSettings(content=content, resource=self._resource)
        self._session = requests.Session()
        self._answer: Any = None
        self._session.hooks["response"].append(self._note_answer)
        if service is None:
            self._exporter = OTLPSpanExporter(session=self._session)
        else:
            self._session.auth = _Headers(service.headers, os.environ)
            self._exporter = OTLPSpanExporter(service.endpoint, session=self._session)
        self._check()

    def metrics(self, row: Row) -> None:
        """Send a row as OTLP metrics, if OTEL_EXPORTER_OTLP_METRICS_ENDPOINT says where.

        Services for traces have no such address, so the general endpoint alone does not send any. Each metric is a
        gauge at the time of its row. The step is a gauge of its own: as an attribute it would make a series per step.
        """
        if self.name != "otlp" or not os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"):
            return
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import export
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        labels = {"art.project": self._run.project, "art.model": self._run.name, "art.run": self._run.id}
        at = int(row.recorded_at.timestamp() * 1e9)
        metrics = [
            export.Metric(metric_name(name), None, None, export.Gauge([export.NumberDataPoint(labels, at, at, value)]))
            for name, value in {**row.metrics, "training_step": float(row.step)}.items()
        ]
        scope = export.ScopeMetrics(InstrumentationScope("art"), metrics, "")
        exporter = OTLPMetricExporter(session=self._session)
        self._export(exporter, export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")]))

    def groups(self, groups: LoggedGroups) -> None:
        key = (groups.split, groups.step, groups.first, len(groups.groups))
        if self._progress.key != key:
            self._progress = _Progress(key)
        progress = self._progress
        for number, spans in enumerate(self._requests(groups)):
            if number < progress.num_done:  # the collector has it: this delivery is repeated after an error
                continue
            try:
                self._export(self._exporter, spans)
            except Refused as error:
                progress.refused_traces |= {span.context.trace_id for span in spans if span.context}
                progress.reasons.append(str(error))
            progress.num_done += 1
        self._progress = _Progress(None)
        if progress.reasons:
            raise Refused("; ".join(dict.fromkeys(progress.reasons)), num_lost=len(progress.refused_traces))

    def close(self, timeout_s: float) -> None:
        if self._exporter is not None:
            self._exporter.shutdown()

    def _check(self) -> None:
        """Send a request without spans, to find a wrong address or key before training begins.

        A collector that is busy, or calls the empty request a bad one (as MLflow does), is there and knows us.
        """
        try:
            self._export(self._exporter, [])
        except OverloadedError:
            return
        except (Refused, OSError) as error:
            if self._answer is not None and self._answer.status_code == _BAD_REQUEST:
                return
            raise ConfigError(
                f"the sink `{self.name}` cannot start: {error}. Check the address and the key, or leave {self.name!r} "
                "out",
                param="report_metrics",
            ) from error

    def _requests(self, groups: LoggedGroups) -> Iterator[list[ReadableSpan]]:
        """Yield the spans of each request, the same ones at each call. A trace may lie in two requests."""
        spans: list[ReadableSpan] = []
        num_bytes = 0
        for span in self._spans(groups):
            size = _size(span)
            if spans and (num_bytes + size > MAX_REQUEST_BYTES or len(spans) == MAX_SPANS):
                yield spans
                spans, num_bytes = [], 0
            spans.append(span)
            num_bytes += size
        if spans:
            yield spans

    def _spans(self, groups: LoggedGroups) -> Iterator[ReadableSpan]:
        """Make one trace after the other: with texts, those of a whole delivery would fill the memory."""
        from art.sinks.otlp_spans import Place, failed_span, rollout_spans

        failures: list[tuple[PydanticException, Place]] = []
        ended_ns = 0
        for number, group in enumerate(groups.groups, start=groups.first):
            places = [
                Place(self._run, groups.split, groups.step, number, index)
                for index in range(len(group.trajectories) + len(group.exceptions))
            ]
            for trajectory, place in zip(group.trajectories, places, strict=False):
                spans = rollout_spans(trajectory, place, self._settings_of(place))
                ended_ns = max(ended_ns, spans[0].end_time or 0)
                yield from spans
            failures += zip(group.exceptions, places[len(group.trajectories) :], strict=True)
        # The log does not say when a rollout failed. The others of the delivery ran at about the same time.
        at = ended_ns / 1e9 or time.time()
        for failure, place in failures:
            yield failed_span(failure, place, at, self._settings_of(place))

    def _settings_of(self, place: Place) -> SpanSettings:
        return replace(self._settings, root_attributes=self.root_attributes(place))

    def _note_answer(self, answer: Any, **_: Any) -> None:
        self._answer = answer

    def _export(self, exporter: Any, content: Any) -> None:
        """Send a request. The exporter only says whether it failed, so the collector's answer says why.

        Raises:
            Refused: the collector will never accept this.
            OverloadedError: it is busy; with the pause that it asks for.
            ConnectionError: it is not there, or does not let us in. Someone may change that, so it is repeated.
        """
        self._answer = None
        exporter.export(content)
        answer = self._answer
        if answer is None:
            raise ConnectionError(f"{exporter._endpoint} cannot be reached")
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


class LangfuseSink(OtlpSink):
    """Sends rollouts to Langfuse: a session per group, a trace per rollout."""

    name: ClassVar[str] = "langfuse"

    def service(self, environment: Mapping[str, str], run: Run) -> Service:
        public, secret = (environment.get(f"LANGFUSE_{kind}_KEY", "") for kind in ("PUBLIC", "SECRET"))
        if not public or not secret:
            raise ConfigError(
                "the sink `langfuse` has no keys: set LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY",
                param="report_metrics",
            )
        host = environment.get("LANGFUSE_BASE_URL") or environment.get("LANGFUSE_HOST") or "https://cloud.langfuse.com"
        token = base64.b64encode(f"{public}:{secret}".encode()).decode()
        name = environment.get("LANGFUSE_TRACING_ENVIRONMENT")
        return Service(
            endpoint=f"{check_url(host, 'LANGFUSE_BASE_URL').rstrip('/')}/api/public/otel/v1/traces",
            # Without the version, Langfuse shows new traces only after minutes.
            headers={"authorization": f"Basic {token}", "x-langfuse-ingestion-version": "4"},
            resource={"langfuse.environment": name} if name else {},
        )

    def root_attributes(self, place: Place) -> Mapping[str, Any]:
        return {
            "langfuse.session.id": place.path.rpartition("/")[0][-200:],
            "langfuse.trace.tags": [place.split, f"step {place.step}"],
        }


class WeaveSink(OtlpSink):
    """Sends rollouts to W&B Weave's endpoint for agents, which groups them by conversation and by agent."""

    name: ClassVar[str] = "weave"

    def service(self, environment: Mapping[str, str], run: Run) -> Service:
        key, entity = environment.get("WANDB_API_KEY", ""), environment.get("WANDB_ENTITY", "")
        if not key or not entity:
            missing = "WANDB_API_KEY" if not key else "WANDB_ENTITY (your user or team)"
            raise ConfigError(f"the sink `weave` needs {missing}: set the variable", param="report_metrics")
        base = environment.get("WF_TRACE_SERVER_URL") or "https://trace.wandb.ai"
        project = environment.get("WANDB_PROJECT") or run.project
        return Service(
            endpoint=f"{check_url(base, 'WF_TRACE_SERVER_URL').rstrip('/')}/agents/otel/v1/traces",
            headers={"wandb-api-key": key},
            resource={"wandb.entity": entity, "wandb.project": project},
        )


class PhoenixSink(OtlpSink):
    """Sends rollouts to Arize Phoenix, each training project to a project of the same name."""

    name: ClassVar[str] = "phoenix"

    def service(self, environment: Mapping[str, str], run: Run) -> Service:
        base = environment.get("PHOENIX_COLLECTOR_ENDPOINT") or "http://localhost:6006"
        pairs = (item.partition("=") for item in environment.get("PHOENIX_CLIENT_HEADERS", "").split(","))
        headers = {key.strip(): unquote(value.strip()) for key, equals, value in pairs if equals}
        if key := environment.get("PHOENIX_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        root = check_url(base, "PHOENIX_COLLECTOR_ENDPOINT").rstrip("/").removesuffix("/v1/traces")
        return Service(
            endpoint=f"{root}/v1/traces",
            headers=headers,
            resource={"openinference.project.name": environment.get("PHOENIX_PROJECT_NAME") or run.project},
        )


class _Headers:
    """Gives requests to a service its own headers, in place of those that the variables name for another collector."""

    def __init__(self, headers: Mapping[str, str], environment: Mapping[str, str]) -> None:
        names = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
        pairs = ",".join(environment.get(name, "") for name in names).split(",")
        self._others = [unquote(pair.partition("=")[0]).strip() for pair in pairs if pair]
        self._headers = headers

    def __call__(self, request: Any) -> Any:
        for name in self._others:
            request.headers.pop(name, None)
        request.headers.update(self._headers)
        return request


def read_content(environment: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variable asks for the texts of messages and tools."""
    value = environment.get(CONTENT_VARIABLE, "").strip().lower()
    if value not in _CONTENT:
        known = ", ".join(filter(None, _CONTENT))
        logger.warning("%s is %r; expected one of %s. No texts are sent", CONTENT_VARIABLE, value, known)
    return _CONTENT.get(value, False)


def check_url(url: str, what: str) -> str:
    """
    Raises:
        ConfigError: `url` is no http address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{what} is {url!r}; expected an address like http://localhost:4318", param="report_metrics")
    return url


def metric_name(name: str) -> str:
    """Return the name of a metric with `_` for characters that OpenTelemetry does not allow."""
    return re.sub(r"[^A-Za-z0-9_./-]", "_", f"art.{name}")[:_MAX_METRIC_NAME]


def _size(span: ReadableSpan) -> int:
    """The size of a span in a request, about: its texts, and some bytes for each attribute."""
    attributes: Sequence[Mapping[str, Any]] = [span.attributes or {}, *(one.attributes or {} for one in span.events)]
    texts = (f"{key}{value}" for each in attributes for key, value in each.items())
    return 100 + sum(len(text.encode()) + 12 for text in texts)
