"""Spans and metrics as OTLP's protobuf messages. `opentelemetry-proto` is imported when the first message is made."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from art.sinks.otlp.content import clean
from art.sinks.otlp.trace import RolloutTrace, Span
from art.sinks.sink import Row

_KINDS = {"internal": trace_pb2.Span.SPAN_KIND_INTERNAL, "client": trace_pb2.Span.SPAN_KIND_CLIENT}
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_./-]")
"""Characters that OpenTelemetry does not allow in the name of a metric."""
_MAX_METRIC_NAME = 255


def encode_trace(trace: RolloutTrace, resource: Mapping[str, str], max_bytes: int) -> Iterator[bytes]:
    """Make bodies of requests to `/v1/traces` that hold the spans of a trace, one as a rule.

    Bodies written one after the other are a body too, with the spans of all.

    Args:
        max_bytes: a longer trace becomes several bodies of about this size.
    """
    spans: list[trace_pb2.Span] = []
    num_bytes = 0
    for span in map(_span, trace.spans):
        if spans and num_bytes + span.ByteSize() > max_bytes:
            yield _traces_body(spans, resource)
            spans, num_bytes = [], 0
        spans.append(span)
        num_bytes += span.ByteSize()
    yield _traces_body(spans, resource)


def _traces_body(spans: Sequence[trace_pb2.Span], resource: Mapping[str, str]) -> bytes:
    scope = trace_pb2.ScopeSpans(scope=_scope(), spans=spans)
    of_resource = trace_pb2.ResourceSpans(resource=_resource(resource), scope_spans=[scope])
    return _bytes(ExportTraceServiceRequest(resource_spans=[of_resource]))


def empty_request() -> bytes:
    """Make the body of a request without spans, which tells whether a collector is there and takes our key."""
    return _bytes(ExportTraceServiceRequest())


def encode_rows(rows: Iterable[Row], attributes: Mapping[str, str], resource: Mapping[str, str]) -> bytes:
    """Make the body of a request to `/v1/metrics`: each metric is a gauge `art.NAME` at the time of its row.

    The step is a gauge of its own, `art.training_step`: as an attribute it would make each step a series of its own.
    """
    metrics = [
        _gauge(name, value, row, attributes)
        for row in rows
        for name, value in {**row.metrics, "training_step": float(row.step)}.items()
    ]
    scope = ScopeMetrics(scope=_scope(), metrics=metrics)
    return _bytes(
        ExportMetricsServiceRequest(
            resource_metrics=[ResourceMetrics(resource=_resource(resource), scope_metrics=[scope])]
        )
    )


def rejected_spans(body: bytes) -> tuple[int, str]:
    """Read how many spans a collector rejected of a request that it accepted, and why."""
    answer = _parsed(ExportTraceServiceResponse(), body)
    return (answer.partial_success.rejected_spans, answer.partial_success.error_message) if answer else (0, "")


def rejected_points(body: bytes) -> tuple[int, str]:
    """Read how many metric values a collector rejected of a request that it accepted, and why."""
    answer = _parsed(ExportMetricsServiceResponse(), body)
    return (answer.partial_success.rejected_data_points, answer.partial_success.error_message) if answer else (0, "")


def _parsed(message: Any, body: bytes) -> Any:
    """The answer of a collector; `None` if it is no protobuf. Some answer an accepted request with other things."""
    try:
        message.ParseFromString(body)
    except DecodeError:
        return None
    return message


def _span(span: Span) -> trace_pb2.Span:
    error = None if span.error is None else trace_pb2.Status(
        code=trace_pb2.Status.STATUS_CODE_ERROR, message=clean(span.error)
    )  # fmt: skip
    return trace_pb2.Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id or b"",
        name=clean(span.name),
        kind=_KINDS[span.kind],
        start_time_unix_nano=_nanoseconds(span.period.start),
        end_time_unix_nano=_nanoseconds(span.period.end),
        attributes=_attributes(span.attributes),
        events=[
            trace_pb2.Span.Event(
                name=event.name, time_unix_nano=_nanoseconds(event.at), attributes=_attributes(event.attributes)
            )
            for event in span.events
        ],
        status=error,
    )


def _gauge(name: str, value: float, row: Row, attributes: Mapping[str, str]) -> Metric:
    at = _nanoseconds(row.recorded_at.timestamp())
    point = NumberDataPoint(time_unix_nano=at, as_double=value, attributes=_attributes(attributes))
    return Metric(name=_NOT_IN_A_NAME.sub("_", f"art.{name}")[:_MAX_METRIC_NAME], gauge=Gauge(data_points=[point]))


def _scope() -> InstrumentationScope:
    return InstrumentationScope(name="art", version=sys.modules["art"].__version__)


def _resource(attributes: Mapping[str, str]) -> Resource:
    return Resource(attributes=_attributes(attributes))


def _attributes(attributes: Mapping[str, Any]) -> Sequence[KeyValue]:
    return [KeyValue(key=clean(key), value=_value(value)) for key, value in attributes.items()]


def _value(value: Any) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_value(item) for item in value]))
    return AnyValue(string_value=clean(str(value)))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))
