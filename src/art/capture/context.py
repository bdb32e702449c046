"""Code that asks a model through an OpenAI client becomes a trajectory, without keeping a record itself.

    async with art.capture(model) as captured:
        await agent(model.openai_client(), scenario)
    captured.trajectory.reward = 1.0

Each request to a model looks whether a capture surrounds it, be it of `model.openai_client()`, of an OpenAI client of
one's own, of litellm, or of anything else that is built on httpx:
- a trainable model's request goes to the base URL of a fresh rollout id, where the server records exact exchanges, and
  the trajectory is made from that record. Any other client, in any dialect, is captured when given `captured.base_url`;
- an answer of somebody else's endpoint is copied on its way to the client (chat completions only).
A capture that took in nothing says so, with the reason.

Captures in concurrent tasks do not see each other; of nested ones the innermost gets the request.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Literal, overload

from art.capture.captured import Captured, CapturedModel, current
from art.trajectory import Trajectory

logger = logging.getLogger(__name__)

_yielded: ContextVar[list[Trajectory] | None] = ContextVar("art_yielded_trajectory", default=None)


@asynccontextmanager
async def capture(model: CapturedModel | None = None) -> AsyncIterator[Captured]:
    """Make a trajectory of what is said to `model` inside; without one, to the first model that is asked.

    When the block raises, nothing is fetched from the server, and the error goes on. When it ends and nothing was
    captured, a warning says why.
    """
    from art.capture.foreign import watch_clients

    captured = Captured(model)
    token = current.set(captured)
    try:
        with watch_clients():
            yield captured
        await captured.refresh()
        captured.trajectory.finish()
        if (why := captured.why_empty()) is not None:
            captured.trajectory.log(why)
            logger.warning("%s", why)
    finally:
        captured._is_over = True
        current.reset(token)


def current_capture() -> Captured | None:
    """The capture that surrounds the caller."""
    return current.get()


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...
@overload
def auto_trajectory(*, required: bool = False) -> Trajectory | None: ...
def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """The trajectory of the surrounding capture, to give it a reward.

    Raises:
        RuntimeError: there is none, and it is `required`.
    """
    if (captured := current.get()) is not None:
        return captured.trajectory
    if required:
        raise RuntimeError("no capture surrounds this: run it in `await art.capture_auto_trajectory(...)`")
    return None


async def capture_auto_trajectory(awaitable: Awaitable[Any], *, model: CapturedModel | None = None) -> Trajectory:
    """Run a rollout that keeps no record and give its trajectory; see `capture` for `model`."""
    async with capture(model) as captured:
        await awaitable
    return captured.trajectory


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand a trajectory to the surrounding `capture_yielded_trajectory`; of several the last counts.

    Raises:
        RuntimeError: nothing surrounds this that would take it.
    """
    if (taken := _yielded.get()) is None:
        raise RuntimeError("nobody takes this trajectory: run this in `await art.capture_yielded_trajectory(...)`")
    taken.append(trajectory)


async def capture_yielded_trajectory(awaitable: Awaitable[Any]) -> Trajectory:
    """Run a rollout that returns something else, and give the trajectory that it yielded.

    Raises:
        RuntimeError: it has yielded none.
    """
    taken: list[Trajectory] = []
    token = _yielded.set(taken)
    try:
        await awaitable
    finally:
        _yielded.reset(token)
    if not taken:
        raise RuntimeError("the rollout has yielded no trajectory: it must call `art.yield_trajectory(trajectory)`")
    return taken[-1]
