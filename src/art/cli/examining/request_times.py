"""Where the time of rollouts goes: seconds of the engine and seconds of everything else, turn by turn.

The server reports each request when it ends, in its live events. A rollout's answers name their requests,
so a rollout is a chain of requests with pauses between them:

    began   |--tool--|==request==|------tool------|==request==|-tool-|   ended

A pause is not all tool: rollouts also wait for the one thread of this process that runs the others. The CPU time of the
process is sampled for that. What it used during a pause is not counted as the tool's, and the rollouts share all of it.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from art.asynchronous.simulation.workload import RolloutTurns, Turn
from art.client.http import HttpClient
from art.messages import is_choice
from art.protocol.live.events import RequestEnded
from art.trajectory import Trajectory

LAST_REPORTS_S = 3.0
"""Longest wait for the reports of the last requests."""
SAMPLE_S = 0.005
"""Time between two samples of the CPU time of this process."""
_DATA = "data:"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTime:
    """When a rollout began and ended, in Unix time, and what it returned."""

    trajectory: Trajectory
    began_s: float
    ended_s: float

    def exchange_ids(self) -> list[str]:
        """Return the ids of the rollout's recorded requests."""
        histories = (self.trajectory, *self.trajectory.additional_histories)
        choices = (item for history in histories for item in history.messages_and_choices if is_choice(item))
        return [name for choice in choices if (name := getattr(choice, "exchange_id", None)) is not None]


@dataclass(slots=True)
class RequestTimes:
    """Requests of a server that have ended."""

    ended: dict[str, RequestEnded] = field(default_factory=dict)
    """The requests, keyed by the id of their exchange."""
    cpu: list[tuple[float, float]] = field(default_factory=list)
    """Samples of Unix time and of the CPU seconds that this process has used."""

    async def wait_for(self, ids: Iterable[str]) -> None:
        """Wait until the requests are reported, but not longer than `LAST_REPORTS_S`."""
        missing = set(ids)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_REPORTS_S):
                while missing := missing - self.ended.keys():
                    await asyncio.sleep(0.05)

    def rollouts(self, rollouts: Sequence[RolloutTime], slowdown: float) -> list[RolloutTurns]:
        """Return the turns of those rollouts whose requests were all reported."""
        num_turns = sum(1 + len(rollout.exchange_ids()) for rollout in rollouts)
        began_s = min((rollout.began_s for rollout in rollouts), default=0.0)
        ended_s = max((rollout.ended_s for rollout in rollouts), default=0.0)
        worker_s = self.used_s(began_s, ended_s) / max(1, num_turns)
        measured = (self.turns(rollout, slowdown, worker_s) for rollout in rollouts)
        return [turns for turns in measured if turns is not None]

    def turns(self, rollout: RolloutTime, slowdown: float, worker_s: float = 0.0) -> RolloutTurns | None:
        """Return the turns of a rollout, with the seconds that each request would have taken alone.

        `None` if a request was not reported. Requests at the same time count one after the other.

        Args:
            slowdown: of the engine's requests, see `slowdown()`.
            worker_s: CPU seconds of this process for each turn.
        """
        requests = [self.ended.get(name) for name in rollout.exchange_ids()]
        if not requests or None in requests:
            return None
        ordered = sorted(cast("list[RequestEnded]", requests), key=lambda request: request.started_at)
        first_s, free_s = ordered[0].started_at, 0.0
        turns = [Turn(engine_s=0.0, tool_s=self._pause(rollout.began_s, first_s), worker_s=worker_s)]
        for place, request in enumerate(ordered):
            free_s = max(free_s, request.started_at + request.total_s)
            next_s = ordered[place + 1].started_at if place + 1 < len(ordered) else rollout.ended_s
            alone_s = request.total_s / (1 + slowdown * (self.load(request) - 1))
            turns.append(Turn(engine_s=alone_s, tool_s=self._pause(free_s, next_s), worker_s=worker_s))
        return turns

    def _pause(self, first_s: float, last_s: float) -> float:
        return max(0.0, last_s - first_s - self.used_s(first_s, last_s))

    def used_s(self, first_s: float, last_s: float) -> float:
        """Return the CPU seconds that this process used between two Unix times, as far as it was sampled."""
        return max(0.0, self._cpu_at(last_s) - self._cpu_at(first_s))

    def _cpu_at(self, time_s: float) -> float:
        """Interpolate between the samples."""
        if not self.cpu:
            return 0.0
        place = bisect.bisect(self.cpu, (time_s, 0.0))
        if place in (0, len(self.cpu)):
            return self.cpu[min(place, len(self.cpu) - 1)][1]
        (early_s, early), (late_s, late) = self.cpu[place - 1], self.cpu[place]
        return early + (late - early) * (time_s - early_s) / (late_s - early_s)

    def load(self, request: RequestEnded) -> float:
        """Return the mean number of requests in progress while `request` was, itself included; at least 1."""
        first, last = request.started_at, request.started_at + request.total_s
        if last <= first:
            return 1.0
        shared_s = sum(
            max(0.0, min(last, other.started_at + other.total_s) - max(first, other.started_at))
            for other in self.ended.values()
        )
        return max(1.0, shared_s / (last - first))

    def slowdown(self) -> float:
        """Estimate how much longer each request takes for every further request at once, as a share of its time alone.

        A request of k tokens beside n - 1 others takes `k * (a + b * (n - 1))` seconds. Least squares give a and b, and
        the result is b / a, between 0 and 1. It is 1, an engine that computes one request after the other, where the
        requests do not tell: where all met the same load.
        """
        rows = [
            (float(request.num_tokens), request.num_tokens * (self.load(request) - 1), request.total_s)
            for request in self.ended.values()
            if request.num_tokens > 0
        ]
        return _slowdown_of(rows)


def _slowdown_of(rows: Sequence[tuple[float, float, float]]) -> float:
    """Solve the normal equations of `total = a * tokens + b * tokens * others`; return b / a, clipped to 0 to 1."""
    tokens2 = sum(tokens * tokens for tokens, _, _ in rows)
    both = sum(tokens * others for tokens, others, _ in rows)
    others2 = sum(others * others for _, others, _ in rows)
    determinant = tokens2 * others2 - both * both
    if others2 == 0 or determinant < 1e-3 * tokens2 * others2:  # no or equal load: a and b cannot be told apart
        return 1.0
    on_tokens = sum(tokens * total for tokens, _, total in rows)
    on_others = sum(others * total for _, others, total in rows)
    a = (on_tokens * others2 - on_others * both) / determinant
    b = (on_others * tokens2 - on_tokens * both) / determinant
    return 1.0 if a <= 0 else min(1.0, max(0.0, b / a))


@contextlib.asynccontextmanager
async def watch_requests(base_url: str | None, api_key: str | None) -> AsyncIterator[RequestTimes]:
    """Context manager: collect the requests of all clients that end in the body, and sample this process's CPU time.

    Args:
        base_url: `inference_base_url` of a registered model.
        api_key: its `inference_api_key`.

    Raises:
        ArtError: the server refuses to report.
        LostAnswerError: the server is away.
    """
    client = HttpClient((base_url or "").partition("/projects/")[0], api_key)
    times, is_open = RequestTimes(), asyncio.Event()

    async def read() -> None:
        async with (
            client.stream("/view/api/live", headers={"Accept": "text/event-stream"}) as response,
            contextlib.aclosing(response.aiter_lines()) as lines,  # type: ignore[type-var]
        ):
            async for line in lines:
                is_open.set()
                if line.startswith(_DATA) and '"request_ended"' in line:
                    request = RequestEnded.model_validate_json(line[len(_DATA) :])
                    times.ended[request.id] = request

    async def sample() -> None:
        while True:
            times.cpu.append((time.time(), time.process_time()))
            await asyncio.sleep(SAMPLE_S)

    reader, opening = asyncio.create_task(read()), asyncio.create_task(is_open.wait())
    sampler = asyncio.create_task(sample())
    try:
        await asyncio.wait({reader, opening}, return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            await reader
        yield times
    finally:
        for task in (reader, opening, sampler):
            task.cancel()
        await asyncio.gather(reader, opening, sampler, return_exceptions=True)
        await client.close()
