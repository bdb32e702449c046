"""`Concurrency`: how many rollouts run at once. A number, `None` for all, or "auto": as many as keep the engine full.

"auto" asks the engine once a second how many requests it computes and how many wait. A rollout that waits for tools
has no request at the engine, so by Little's law the number of rollouts that fills the engine's seats follows from the
share of its life that a rollout spends there:

    share  = (running + waiting) / rollouts in flight             means over the last seconds
    room   = seats, or `running` if requests wait although seats are free: then memory is the bound
    target = (1 + QUEUE) * room / share

Agents that wait for tools nine tenths of their time run ten times as many rollouts as the engine has seats; agents that
only sample run as many as it has seats, and a tenth more, so that a seat that falls free is taken at once.

    up     by at most one for each rollout that ends, towards the target, while all slots are taken. So it at most
           doubles in the time of a rollout (the slow start of TCP, RFC 5681). Rollouts that all begin with a long tool
           call cannot raise it: none has ended yet. The growth of prime-rl has this clock too (pull request 3285).
    down   at once, but by at most a fifth a second. Running rollouts go on; fewer begin.
    hold   while the engine sleeps, is not up or does not answer, and upwards while its memory for keys and values is
           fuller than KV_FULL: running rollouts still grow, and a full memory makes vLLM compute requests again.

It starts at the number of seats, and stays between LOWEST and HIGHEST. What waits for a slot gets it in the order of
its key, which is the group's number: the oldest groups first, because the next step waits for them.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias

from art.errors import ArtError, ConfigError
from art.protocol.answers import EnginePressure

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two questions to the engine. A completion takes about as long, so nothing is missed."""
SILENCE_S = 5.0
"""Longest wait for an answer. While there is none, rollouts that end may have failed, and add no others."""
SHORTEST, LONGEST = 10, 300
"""Polls that the means cover: about as many as a rollout takes, within these bounds. Rollouts that begin together also
come to their tools together, so a mean over less than a rollout's life goes up and down with them."""
QUEUE = 0.1
"""Requests that should wait at the engine, as a share of those that it can compute. Without any queue a seat is empty
from the end of one request until the next one arrives."""
KV_FULL = 0.85
"""Used share of the memory for keys and values above which no further rollouts are added (prime-rl: 0.6 to 0.8)."""
FALL = 0.8
"""The limit falls to this share of itself at most in one poll."""
LOWEST, HIGHEST = 4, 4096
"""Bounds of the limit. An engine that others fill still gets a few rollouts; the highest keeps a client's memory and
sockets in bounds (a rollout is about a socket and 100 KB)."""
WITHOUT_ANSWER = 64
"""Limit while the engine has not answered yet: the seats that an engine has unless its settings say otherwise."""

STARTS_PER_TURN = 16
"""Rollouts that begin in one turn of the event loop. All at once would keep server and engine waiting until the last
has made its request, and then come to the engine one by one: `art demo` takes an eighth longer."""

Order: TypeAlias = tuple[int, int]
"""Number of the group, and index of the rollout in it."""


class Concurrency:
    """Limits how many rollouts run at once. It belongs to one event loop."""

    def __init__(
        self, limit: int | Literal["auto"] | None, pressure: Callable[[], Awaitable[EnginePressure]] | None = None
    ) -> None:
        """
        Args:
            limit: most rollouts at once; `None` for no limit; "auto" to follow the engine.
            pressure: asks the engine how busy it is; needed for "auto".

        Raises:
            ConfigError: "auto" without an engine to ask, or a limit below 1.
        """
        if limit == "auto" and pressure is None:
            raise ConfigError(
                'max_concurrent="auto" follows the load of the engine, and this model has none to ask; give a number, '
                "or None for no limit",
                param="max_concurrent",
            )
        if isinstance(limit, int) and limit < 1:
            raise ConfigError(f"`max_concurrent` must be at least 1, got {limit}", param="max_concurrent")
        self._pressure = pressure if limit == "auto" else None
        self._controller = SlotController() if limit == "auto" else None
        self._fixed = limit if isinstance(limit, int) else None
        self.num_running = 0
        """Rollouts that hold a slot."""
        self._waiting: list[tuple[Order, int, asyncio.Future[None]]] = []
        """Rollouts that wait for a slot, as a heap; those that were cancelled too, until their turn comes."""
        self._num_queued = 0
        self._will_fill = False
        """Whether `_fill` runs in the next turn of the event loop."""
        self._sums: defaultdict[str, float] = defaultdict(float)
        """Sums over the answers of the engine since the last `metrics`, and the seconds that rollouts waited."""

    @property
    def limit(self) -> int | None:
        """Most rollouts at once now; `None` for no limit."""
        return self._fixed if self._controller is None else int(self._controller.limit)

    @property
    def num_waiting(self) -> int:
        """Rollouts that wait for a slot."""
        return sum(not turn.done() for *_, turn in self._waiting)

    @asynccontextmanager
    async def slot(self, order: Order) -> AsyncGenerator[None]:
        """Wait for a slot, and hold it during the body. Of those that wait, the lowest `order` is next."""
        arrived = time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_queued += 1
        heapq.heappush(self._waiting, (order, self._num_queued, turn))
        self._fill_soon()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given its slot just before
                self.num_running -= 1
                self._fill_soon()
            raise
        self._sums["waited_s"] += time.monotonic() - arrived
        try:
            yield
        finally:
            self.num_running -= 1
            if self._controller is not None:
                self._controller.ended(self.num_running + 1)
            self._fill_soon()

    async def run(self) -> None:
        """Follow the engine until cancelled, if the limit is "auto"; otherwise return at once."""
        if self._controller is None or self._pressure is None:
            return
        is_silent = False
        while True:
            seen: EnginePressure | None
            try:
                async with asyncio.timeout(SILENCE_S):
                    seen = await self._pressure()
            except (ArtError, TimeoutError) as error:
                seen = None
                if not is_silent:
                    text = "the engine does not say how busy it is, so at most %d rollouts run at once: %s"
                    logger.warning(text, int(self._controller.limit), str(error) or f"no answer within {SILENCE_S:g} s")
            is_silent = seen is None
            self._controller.observe(seen, self.num_running)
            if seen is not None and not seen.asleep:
                counted = {"polls": 1, "rollouts": self.num_running, "waiting": seen.waiting, "seats": seen.seats}
                for name, value in {**counted, "used": min(seen.running, seen.seats)}.items():
                    self._sums[name] += value
            self._fill_soon()
            await asyncio.sleep(POLL_S)

    def metrics(self) -> dict[str, float]:
        """Return numbers about the time since the last call, as `pipeline/concurrency_...`."""
        sums, self._sums = self._sums, defaultdict(float)
        numbers = {
            "pipeline/concurrency_running": float(self.num_running),
            "pipeline/concurrency_wait_s": sums["waited_s"],
        }
        if self.limit is not None:
            numbers["pipeline/concurrency_limit"] = float(self.limit)
        if sums["polls"]:
            numbers["pipeline/concurrency_rollouts_mean"] = sums["rollouts"] / sums["polls"]
            numbers["pipeline/engine_seats_used_share"] = sums["used"] / max(1.0, sums["seats"])
            numbers["pipeline/engine_waiting_mean"] = sums["waiting"] / sums["polls"]
        return numbers

    def _fill_soon(self) -> None:
        if not self._will_fill:
            self._will_fill = True
            asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        """Give slots to those that wait, in this turn of the event loop and the next ones."""
        self._will_fill = False
        for _ in range(STARTS_PER_TURN):
            if not self._waiting or (self.limit is not None and self.num_running >= self.limit):
                return
            turn = heapq.heappop(self._waiting)[2]
            if not turn.cancelled():
                self.num_running += 1
                turn.set_result(None)
        self._fill_soon()


class SlotController:
    """Finds the number of rollouts that keeps the engine full; the module's docstring has the formula. No clock."""

    def __init__(self) -> None:
        self.limit = float(WITHOUT_ANSWER)
        self.target = self.limit
        self._answered = False
        self._requests = self._rollouts = self._ends = self._room = 0.0
        """Means over the last polls, not yet divided by the sum of their weights, which cancels out."""
        self._weight = 0.0
        self._held = False
        self._num_ended = 0

    def ended(self, num_running: int) -> None:
        """Note the end of a rollout; `num_running` rollouts held a slot until then."""
        self._num_ended += 1
        if not self._held and num_running >= int(self.limit) and self.limit < self.target:
            self.limit = min(self.limit + 1, self.target)

    def observe(self, seen: EnginePressure | None, num_running: int) -> None:
        """Take an answer of the engine, `None` for none, while `num_running` rollouts hold a slot."""
        if seen is None or seen.asleep or seen.seats == 0:
            self._held = True
            return
        if not self._answered:
            self._answered = True
            self.limit = self.target = _bounded(seen.seats)
            return
        # Means over the last polls: the weight of each falls with every further one.
        room = seen.running if seen.waiting and seen.running < seen.seats else seen.seats
        lifetime = self._rollouts / max(self._ends, 1e-9)  # in polls, by Little's law
        stays = 1 - 1 / min(max(lifetime, SHORTEST), LONGEST)
        self._ends, self._num_ended = self._ends * stays + self._num_ended, 0
        self._requests = self._requests * stays + seen.running + seen.waiting
        self._rollouts = self._rollouts * stays + num_running
        self._room = self._room * stays + max(1, room)
        self._weight = self._weight * stays + 1
        if not self._requests:  # no rollout has asked yet
            self._held = True
            return
        self.target = _bounded((1 + QUEUE) * (self._room / self._weight) * self._rollouts / self._requests)
        self._held = seen.kv_used_share is not None and seen.kv_used_share > KV_FULL
        if self.target < self.limit:
            self.limit = max(self.target, self.limit * FALL)


def _bounded(value: float) -> float:
    return float(min(max(value, LOWEST), HIGHEST))
