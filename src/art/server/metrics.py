"""`/metrics`, by Prometheus' own client. Each label has few values: a route is labelled with its declared path, never
with the path that was sent. What the server's parts measure themselves is asked for when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from art.protocol.answers import Measurement

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histogram of durations, in seconds: from a status look-up to a long completion."""

FAMILIES: dict[str, tuple[Literal["counter", "gauge", "histogram"], str]] = {
    "art_http_requests_total": ("counter", "Requests that were answered, by route and status."),
    "art_http_request_seconds": ("histogram", "Seconds from a request to the end of its answer, by route."),
    "art_http_running": ("gauge", "Requests that are running."),
    "art_http_refused_total": ("counter", "Requests refused with 429, by the limit that was reached."),
    "art_tokens_total": ("counter", "Tokens of chat requests: prompt, cached (part of prompt) and completion."),
    "art_jobs": ("gauge", "Training jobs that have not ended, by state."),
    "art_engine_running": ("gauge", "Requests that an engine decodes."),
    "art_engine_waiting": ("gauge", "Requests that wait for an engine."),
    "art_engine_adapters": ("gauge", "Adapters that an engine has loaded."),
    "art_engine_generated_tokens_total": ("counter", "Tokens that an engine sampled."),
    "art_engine_prefill_tokens_total": ("counter", "Prompt tokens that an engine computed."),
    "art_engine_cached_tokens_total": ("counter", "Prompt tokens that an engine had in its cache."),
    "art_engine_steps_total": ("counter", "Forward passes of an engine."),
    "art_engine_step_seconds_total": ("counter", "Time in forward passes of an engine."),
    "art_engine_preemptions_total": ("counter", "Requests that an engine put back for lack of memory."),
    "art_process_up": ("gauge", "Whether a process of the server runs and has loaded its model."),
    "art_process_restarts_total": ("counter", "Times that a process was started again."),
    "art_process_resident_bytes": ("gauge", "Memory of a process."),
    "art_disk_free_bytes": ("gauge", "Free space of the data directory."),
}
"""Kind and explanation of every number that `/metrics` shows, by name."""


class Metrics:
    """Counts HTTP requests and measures their durations for `/metrics`. A server has one."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        requests, seconds = "art_http_requests_total", "art_http_request_seconds"
        labels = ["method", "route", "status"]
        self._requests = Counter(requests, FAMILIES[requests][1], labels, registry=self._registry)
        self._seconds = Histogram(seconds, FAMILIES[seconds][1], ["route"], buckets=BUCKETS_S, registry=self._registry)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended. `route` is a declared path."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self, measurements: Iterable[Measurement]) -> bytes:
        """Make the text of `/metrics` from the counted requests and from `measurements` of the server's other parts."""
        return generate_latest(self._registry) + generate_latest(_Measured(measurements))


class _Measured(CollectorRegistry):
    """A registry of what was measured just now."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        super().__init__()
        self._measurements = list(measurements)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for one in self._measurements:
            if one.name not in families:
                kind, text = FAMILIES[one.name]
                make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                families[one.name] = make(one.name, text, labels=list(one.labels))
            families[one.name].add_metric(list(one.labels.values()), one.value)
        return families.values()
