"""The state of the HTTP server that does not belong to the runtime: limits, metrics, which paths to hide."""

from __future__ import annotations

import asyncio
import collections
import copy
import functools
import os
import re
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from art.config import LimitsConfig, ServerConfig
from art.errors import ArtError, OverloadedError, StorageError
from art.gateway.workers import Workers
from art.protocol.answers import Measurement
from art.server.auth import SERVER_KEY_ID, Caller, Keyring


class HiddenPaths:
    """Removes the folders of this machine from texts and errors: only keys with scope `admin` see absolute paths.

    /srv/art/search/models/agent/checkpoints/0004  -->  search/models/agent/checkpoints/0004     in the data directory
    /mnt/models/qwen                               -->  qwen                                     elsewhere
    """

    def __init__(self, data_dir: Path | None) -> None:
        self.data_dir = data_dir
        roots = {str(data_dir.absolute()), str(data_dir.resolve())} if data_dir is not None else set()
        self._roots = [re.compile(rf"{re.escape(root)}(/|(?![\w-]))") for root in sorted(roots, key=len, reverse=True)]

    def hide(self, text: str) -> str:
        """Make the paths in a text relative to the data directory. Of a path elsewhere the last part is left."""
        for root in self._roots:
            text = root.sub(lambda match: "" if match[1] else "data_dir", text)
        return _absolute_path().sub(lambda match: match[1], text)

    def hide_in(self, error: BaseException) -> BaseException:
        """Return a copy of one of ART's errors without folders in its message; other errors as they are."""
        if not isinstance(error, ArtError):
            return error
        shown = copy.copy(error)
        shown.message = self.hide(error.message)
        return shown


@functools.cache
def _absolute_path() -> re.Pattern[str]:
    """Matches a path below a folder that this machine has at its root. The last part of the path is the group."""
    top = "|".join(re.escape(name) for name in sorted(os.listdir("/")))
    part = r"[^\s/'\"`,;:()\\<>\]\[{}]+"
    return re.compile(rf"(?<![\w.:/-])(?:file://)?/(?:{top})(?:/{part})*/({part})/?")


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
    "art_engine_process_requests": ("gauge", "Requests that one engine process computes."),
    "art_engine_process_policies": ("gauge", "Adapters that one engine process has proved to serve."),
    "art_engine_process_refused": ("gauge", "Adapters that one engine process refused though another one serves them."),
    "art_process_up": ("gauge", "Whether a process of the server runs and has loaded its model."),
    "art_process_restarts_total": ("counter", "Times that a process was started again."),
    "art_process_resident_bytes": ("gauge", "Memory of a process."),
    "art_cluster_nodes": ("gauge", "Machines of the cluster, by state: alive or gone."),
    "art_cluster_workers": ("gauge", "Workers that have come to the server, by kind and state: waiting or working."),
    "art_cluster_lost_total": ("counter", "Workers whose connection to the server ended."),
    "art_cluster_store_used_bytes": ("gauge", "Used part of the cluster's object store."),
    "art_disk_free_bytes": ("gauge", "Free space of the data directory."),
}
"""Kind and explanation of every number that `/metrics` shows, by name."""


class Metrics:
    """Counts HTTP requests and measures their durations for `/metrics`, by Prometheus' own client. A server has one.

    Each label has few values: a route is labelled with its declared path, never with the path that was sent. What the
    server's parts measure themselves is asked for when somebody scrapes.
    """

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
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for one in measurements:
            if one.name not in families:
                kind, text = FAMILIES[one.name]
                make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                families[one.name] = make(one.name, text, labels=list(one.labels))
            families[one.name].add_metric(list(one.labels.values()), one.value)
        measured = cast("CollectorRegistry", SimpleNamespace(collect=families.values))
        return generate_latest(self._registry) + generate_latest(measured)


class Limiter:
    """Counts running requests, and refuses those above a limit with status 429 and the time to wait. Use it in one
    event loop.

    There are limits for each key and for all keys together. The key that the server was started with belongs to the
    operator, e.g. to `LocalBackend`. Only the limit for all keys together applies to it.
    """

    def __init__(self, config: LimitsConfig) -> None:
        self._config = config
        self._per_key: collections.Counter[str] = collections.Counter()
        self._chats: collections.Counter[str] = collections.Counter()
        self.running = 0
        """Number of running requests."""
        self.num_refused: collections.Counter[str] = collections.Counter()
        """Number of refused requests, by the name of the limit."""

    @contextmanager
    def admit(self, caller: Caller, *, samples: bool) -> Generator[None]:
        """Context manager: count one request while its body runs.

        Args:
            samples: whether the request asks an engine for tokens.

        Raises:
            OverloadedError: a limit is reached.
        """
        config, key, project = self._config, caller.key_id, caller.project
        if self.running >= config.max_requests:
            raise self._refusal("max_requests", f"{self.running} requests are running on this server")
        if key != SERVER_KEY_ID:
            if config.max_requests_per_key is not None and self._per_key[key] >= config.max_requests_per_key:
                raise self._refusal("max_requests_per_key", f"{self._per_key[key]} requests of key {key} are running")
            most = config.max_chats_per_project
            if samples and project is not None and most is not None and self._chats[project] >= most:
                raise self._refusal("max_chats_per_project", f"{most} chats of project {project} are running")
        counters = [(self._per_key, key)]
        if samples and project is not None:
            counters.append((self._chats, project))
        self.running += 1
        for counter, name in counters:
            counter[name] += 1
        try:
            yield
        finally:
            self.running -= 1
            for counter, name in counters:
                counter[name] -= 1
                if not counter[name]:
                    del counter[name]

    def _refusal(self, limit: str, count: str) -> OverloadedError:
        self.num_refused[limit] += 1
        return OverloadedError(f"{count}, which is the limit (`limits.{limit}` of the server); try again later")


READY_EVERY_S = 1.0


class ServerState:
    """State of the HTTP server that all requests share: limits, metrics, readiness."""

    def __init__(
        self, config: ServerConfig, openapi: Callable[[], bytes], paths: HiddenPaths, keyring: Keyring
    ) -> None:
        """
        Args:
            openapi: makes the OpenAPI document. It is called only when somebody asks, because that takes a moment.
            paths: removes folders of the machine from what keys without scope `admin` see.
            keyring: all valid keys.
        """
        self.config, self.openapi, self.paths, self.keyring = config, openapi, paths, keyring
        self.limiter = Limiter(config.limits)
        self.workers = Workers()
        """Decode large bodies."""
        self.metrics = Metrics()
        self._finding = asyncio.Lock()
        self._obstacles: dict[str, str] = {}
        self._found_at = float("-inf")

    async def obstacles(self, find: Callable[[], Awaitable[dict[str, str]]]) -> dict[str, str]:
        """Return what keeps the server from working, as `find` reports it. `find` runs at most every `READY_EVERY_S`,
        because it writes to the disk and `/ready` needs no key."""
        async with self._finding:
            now = time.monotonic()
            if now - self._found_at >= READY_EVERY_S:
                self._obstacles, self._found_at = await find(), now
                try:
                    await asyncio.to_thread(self.keyring.check)
                except StorageError as error:
                    self._obstacles = self._obstacles | {"keys": error.message}
            return self._obstacles

    def measurements(self) -> Iterator[Measurement]:
        yield Measurement("art_http_running", float(self.limiter.running))
        for limit, count in self.limiter.num_refused.items():
            yield Measurement("art_http_refused_total", float(count), {"limit": limit})
