"""The rollout that the running code belongs to: which checkpoint it asks, and the seed of its sampling.

A pipeline sets it around each rollout that it starts. It is a context variable, so it also holds in the tasks and
threads (`asyncio.to_thread`) that the rollout starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import quote

SEED_HEADER = "x-art-seed"
"""Header of a request that tells the server where its random numbers begin, unless its body has a `seed`."""

SCENARIO_HEADER = "x-art-scenario"
"""Header of a request that names the scenario of its rollout, percent-encoded, for people who watch."""
_LONGEST_SCENARIO = 200


def derive_seed(*parts: int | str) -> int:
    """Derive a seed in [0, 2^63) from all parts and their order. It is the same in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What requests of one rollout have in common."""

    model: str
    """The model that is trained, `project/name`. Requests to other models are not changed."""
    step: int | None = None
    """Checkpoint that answers the rollout's requests; `None` for the newest at the time of each request."""
    seed: int | None = None
    """Seed of the rollout; each request gets a seed of its own, made from it and the number of the request."""
    scenario: str | None = None
    """What people who watch see as the title of its requests."""
    switches: bool = False
    """Whether an answer that is being sampled when a step is published goes on with the new weights. It needs
    `step=None`: a request that names a checkpoint is answered by that one."""
    _requests: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def next_seed(self) -> int | None:
        """Return the seed of the next request, in [0, 2^63). `None` if the rollout has no seed."""
        if self.seed is None:
            return None
        return derive_seed(self.seed, next(self._requests))


current_rollout: ContextVar[RolloutContext | None] = ContextVar("current_rollout", default=None)


@contextlib.contextmanager
def inside_rollout(context: RolloutContext) -> Iterator[RolloutContext]:
    """Context manager: the code of the body belongs to this rollout."""
    token = current_rollout.set(context)
    try:
        yield context
    finally:
        current_rollout.reset(token)


def pinned_step(model: str) -> int | None:
    """Return the checkpoint of `model` (`project/name`) that the running rollout asks; `None` for the newest."""
    context = current_rollout.get()
    return context.step if context is not None and context.model == model else None


def request_headers(model: str) -> dict[str, str]:
    """Return the headers that a request to `model` (`project/name`) needs because of the rollout that sends it.

    Call it once per request, not for its repetitions: each call uses up a seed.
    """
    from art.protocol.rollouts import IN_FLIGHT_HEADER

    context = current_rollout.get()
    if context is None or context.model != model:
        return {}
    headers = {IN_FLIGHT_HEADER: "switch"} if context.switches else {}
    if (seed := context.next_seed()) is not None:
        headers[SEED_HEADER] = str(seed)
    if context.scenario is not None:
        headers[SCENARIO_HEADER] = quote(context.scenario[:_LONGEST_SCENARIO])
    return headers
