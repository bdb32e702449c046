"""`/metrics` in Prometheus' text format, version 0.0.4.

A request costs two dictionary look-ups and a binary search; everything else is measured when somebody scrapes. Each
label has few values: a route is labelled with its declared path, never with the path that was sent.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from art.protocol.answers import Measurement

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
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


@dataclass(slots=True)
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """Number of observations in each bucket; the last entry counts those above all bounds."""
    total: float = 0.0


class Metrics:
    """Counts HTTP requests and measures their durations for `/metrics`. A server has one."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[str, _Histogram] = {}

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended. `route` is a declared path."""
        self._requests[method, route, status] += 1
        histogram = self._seconds.get(route)
        if histogram is None:
            histogram = self._seconds[route] = _Histogram()
        histogram.counts[bisect_left(BUCKETS_S, seconds)] += 1
        histogram.total += seconds

    def render(self, measurements: Iterable[Measurement]) -> bytes:
        """Make the text of `/metrics` from the counted requests and from `measurements` of the server's other parts."""
        samples: dict[str, list[str]] = {name: [] for name in FAMILIES}
        for measurement in [*self._counted(), *measurements]:
            samples[measurement.name].append(_line(measurement.name, measurement.labels, measurement.value))
        samples["art_http_request_seconds"] += self._histogram_lines()
        lines: list[str] = []
        for name, rows in samples.items():
            if rows:
                kind, text = FAMILIES[name]
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *rows]
        return ("\n".join(lines) + "\n").encode()

    def _counted(self) -> Iterator[Measurement]:
        for (method, route, status), count in self._requests.items():
            labels = {"method": method, "route": route, "status": str(status)}
            yield Measurement("art_http_requests_total", float(count), labels)

    def _histogram_lines(self) -> Iterator[str]:
        name = "art_http_request_seconds"
        for route, histogram in self._seconds.items():
            seen = 0
            for bound, count in zip([*BUCKETS_S, float("inf")], histogram.counts, strict=True):
                seen += count
                yield _line(f"{name}_bucket", {"route": route, "le": _number(bound)}, seen)
            yield _line(f"{name}_sum", {"route": route}, histogram.total)
            yield _line(f"{name}_count", {"route": route}, seen)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
