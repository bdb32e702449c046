"""`OtlpSink`: sends each rollout as a trace to any collector that speaks OTLP over HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from art.errors import ConfigError
from art.sinks.otlp.collector import Collector
from art.sinks.otlp.parcels import Parcel, Progress, pack
from art.sinks.otlp.settings import OtlpSettings, read_content, read_settings
from art.sinks.otlp.spans import failed_trace, rollout_trace
from art.sinks.otlp.trace import Place, RolloutTrace, SpanSettings
from art.sinks.sink import LoggedGroups, Refused, Row, Run, Sink
from art.trajectory import PydanticException

MAX_REQUEST_BYTES = 3 * 2**20
"""Size of a request before compression. Langfuse takes 5 MB, collectors 4 MB and more."""
MAX_TRACES = 200
"""Traces of one request."""


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
        self._progress: Progress | None = None

    def settings(self, environment: Mapping[str, str], run: Run) -> OtlpSettings:
        """Read where to send traces of `run`. A service with variables of its own overrides this.

        Raises:
            ConfigError: a variable is missing or cannot be honoured.
        """
        return read_settings(environment)

    def start(self, run: Run) -> None:
        try:
            from art.sinks.otlp import wire
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the sink `{self.name}` needs the package {error.name!r}: "
                "pip install 'agent-reinforcement-trainer[otlp]'",
                param="report_metrics",
            ) from error
        self._wire = wire
        self._run = run
        self._settings = self.settings(os.environ, run)
        content = read_content(os.environ) if self._content is None else self._content
        self._spans = SpanSettings(content=content)
        self._collector = Collector(self._settings)
        self._collector.check(self._settings.traces_url, wire.empty_request(), self._settings.headers, name=self.name)

    def metrics(self, row: Row) -> None:
        """Send a row as OTLP metrics, if OTEL_EXPORTER_OTLP_METRICS_ENDPOINT says where.

        Services for traces have no such address, so the general endpoint alone does not send any.
        """
        url = self._settings.metrics_url
        if url is None:
            return
        attributes = {"art.project": self._run.project, "art.model": self._run.name, "art.run": self._run.id}
        body = self._wire.encode_rows([row], attributes, self._settings.resource)
        num_rejected, reason = self._wire.rejected_points(
            self._collector.post(url, body, self._settings.metrics_headers)
        )
        if num_rejected:
            raise Refused(f"{num_rejected} values: {reason}")

    def groups(self, groups: LoggedGroups) -> None:
        key = (groups.split, groups.step, groups.first, len(groups.groups))
        if self._progress is None or self._progress.key != key:
            self._progress = Progress(key)
        try:
            self._progress.send_all(self.parcels(self._traces(groups)))
        except Refused:
            self._progress = None
            raise
        self._progress = None

    def parcels(self, traces: Iterable[RolloutTrace]) -> Iterator[Parcel[Any]]:
        """Yield the requests that report these rollouts, the same ones at each call."""
        resource = self._settings.resource
        bodies = (body for trace in traces for body in self._wire.encode_trace(trace, resource, MAX_REQUEST_BYTES))
        yield from pack(bodies, self._send, len, max_bytes=MAX_REQUEST_BYTES, max_items=MAX_TRACES)

    def root_attributes(self, place: Place) -> Mapping[str, Any]:
        """Return further attributes of a rollout's first span, for services that read names of their own."""
        return {}

    def close(self, timeout_s: float) -> None:
        if hasattr(self, "_collector"):
            self._collector.close()

    def _traces(self, groups: LoggedGroups) -> Iterator[RolloutTrace]:
        """Make one trace after the other: with texts, those of a whole delivery would fill the memory."""
        failures: list[tuple[PydanticException, Place]] = []
        ended = 0.0
        for number, group in enumerate(groups.groups, start=groups.first):
            places = [
                Place(self._run, groups.split, groups.step, number, index)
                for index in range(len(group.trajectories) + len(group.exceptions))
            ]
            for trajectory, place in zip(group.trajectories, places, strict=False):
                trace = rollout_trace(trajectory, place, self._spans)
                ended = max(ended, trace.root.period.end)
                yield self._finish(trace, place)
            failures += zip(group.exceptions, places[len(group.trajectories) :], strict=True)
        # The log does not say when a rollout failed. The others of the delivery ran at about the same time.
        for failure, place in failures:
            yield self._finish(failed_trace(failure, place, ended or time.time(), self._spans), place)

    def _finish(self, trace: RolloutTrace, place: Place) -> RolloutTrace:
        trace.root.attributes.update(self.root_attributes(place))
        return trace

    def _send(self, bodies: Sequence[bytes]) -> tuple[int, str]:
        url, headers = self._settings.traces_url, self._settings.headers
        return self._wire.rejected_spans(self._collector.post(url, b"".join(bodies), headers))
