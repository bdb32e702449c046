"""Limits for each key and for all keys together. A request above a limit gets status 429 and the time to wait.

The key that the server was started with belongs to the operator, e.g. to `LocalBackend`. Only the limit for all keys
together applies to it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from art.config import LimitsConfig
from art.errors import OverloadedError
from art.server.auth import SERVER_KEY_ID, Caller

BURST_S = 10.0
"""A key that was idle may send at once as many requests as its rate allows in this time."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket: each request takes one token."""

    tokens: float
    at: float
    """When the tokens were last counted."""


class Limiter:
    """Counts running requests and refuses those above a limit. Use it in one event loop."""

    def __init__(self, config: LimitsConfig, *, now: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._now = now
        self._buckets: dict[str, _Bucket] = {}
        self._per_key: Counter[str] = Counter()
        self._chats: Counter[str] = Counter()
        self.running = 0
        """Number of running requests."""
        self.num_refused: Counter[str] = Counter()
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
            self._take_token(key)
        self._count(caller, samples, 1)
        try:
            yield
        finally:
            self._count(caller, samples, -1)

    def _count(self, caller: Caller, samples: bool, step: int) -> None:
        self.running += step
        _add(self._per_key, caller.key_id, step)
        if samples and caller.project is not None:
            _add(self._chats, caller.project, step)

    def _take_token(self, key: str) -> None:
        per_minute = self._config.max_requests_per_minute_per_key
        if per_minute is None:
            return
        now, rate = self._now(), per_minute / 60
        full = max(1.0, rate * BURST_S)
        bucket = self._buckets.setdefault(key, _Bucket(full, now))
        bucket.tokens, bucket.at = min(full, bucket.tokens + (now - bucket.at) * rate), now
        if bucket.tokens < 1:
            wait_s = (1 - bucket.tokens) / rate
            raise self._refusal(
                "max_requests_per_minute_per_key", f"key {key} sends more than {per_minute} a minute", wait_s
            )
        bucket.tokens -= 1

    def _refusal(self, limit: str, count: str, wait_s: float | None = None) -> OverloadedError:
        self.num_refused[limit] += 1
        error = OverloadedError(f"{count}, which is the limit (`limits.{limit}` of the server); try again later")
        if wait_s is not None:
            error.retry_after_s = wait_s
        return error


def _add(counter: Counter[str], name: str, step: int) -> None:
    counter[name] += step
    if not counter[name]:
        del counter[name]
