"""`art.capture` makes a trajectory of the requests that code sends to a model.

    async with art.capture(model) as captured:
        await agent(model.openai_client(), scenario)
    captured.trajectory.reward = 1.0

Requests of any client that is built on httpx are captured: `model.openai_client()`, the user's own OpenAI client,
litellm and others.
- A request to a trainable model is sent to the base URL of a new rollout id. The server records exact exchanges there,
  and the trajectory is made from them. Any other client, in any dialect, is captured if it uses `captured.base_url`.
- An answer of another endpoint is copied on its way to the client (chat completions only).
A capture that is empty logs the reason.

Captures in concurrent tasks are independent. In nested captures the innermost gets the request.

`with art.Trajectory() as trajectory:` captures chat completions into a trajectory without asking the server: answers
are copied on their way to the client, with the ids by which training finds their tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, overload

from art.capture.captured import Captured, CapturedModel, current
from art.trajectory import Trajectory, TrajectoryGroup, capture_with

logger = logging.getLogger(__name__)

_yielded: ContextVar[list[Trajectory] | None] = ContextVar("art_yielded_trajectory", default=None)


@asynccontextmanager
async def capture(model: CapturedModel | None = None) -> AsyncIterator[Captured]:
    """Make a trajectory of the conversations with `model` inside the block; by default with the first model asked.

    If the block raises, nothing is fetched from the server and the error is raised. If nothing was captured, a warning
    says why.
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


@contextmanager
def _copy_into(trajectory: Trajectory) -> Iterator[None]:
    """Context manager: copy answers that code inside receives into a trajectory; see `Trajectory.__enter__`."""
    from art.capture.foreign import watch_clients

    captured = Captured(trajectory=trajectory, _copies=True)
    token = current.set(captured)
    try:
        with watch_clients():
            yield
        trajectory.finish()
    finally:
        captured._is_over = True
        current.reset(token)


capture_with(_copy_into)


@contextmanager
def no_capture() -> Iterator[None]:
    """Context manager: requests inside it are not captured, for example those of a judge within a rollout."""
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)


async def trajectory_group(
    trajectories: Iterable[Awaitable[Trajectory]], *, return_exceptions: bool = False
) -> TrajectoryGroup:
    """Run the rollouts of one scenario at once, and return their group.

    Args:
        return_exceptions: keep the exceptions of failed rollouts in the group, instead of raising the first.
    """
    return TrajectoryGroup(await asyncio.gather(*trajectories, return_exceptions=return_exceptions))


def current_capture() -> Captured | None:
    """Return the capture that surrounds the caller; `None` if there is none."""
    return current.get()


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...
@overload
def auto_trajectory(*, required: bool = False) -> Trajectory | None: ...
def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """Return the trajectory of the surrounding capture, for example to set its reward; `None` without a capture.

    Raises:
        RuntimeError: no capture surrounds the caller, and one is `required`.
    """
    if (captured := current.get()) is not None:
        return captured.trajectory
    if required:
        raise RuntimeError("no capture surrounds this call: run it in `await art.capture_auto_trajectory(...)`")
    return None


current_trajectory = auto_trajectory


async def capture_auto_trajectory(awaitable: Awaitable[Any], *, model: CapturedModel | None = None) -> Trajectory:
    """Run a rollout that keeps no record, and return its trajectory; see `capture` for `model`."""
    async with capture(model) as captured:
        await awaitable
    return captured.trajectory


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand a trajectory to the surrounding `capture_yielded_trajectory`; the last one counts.

    Raises:
        RuntimeError: no `capture_yielded_trajectory` surrounds the caller.
    """
    if (taken := _yielded.get()) is None:
        raise RuntimeError("no call takes this trajectory: run this in `await art.capture_yielded_trajectory(...)`")
    taken.append(trajectory)


async def capture_yielded_trajectory(awaitable: Awaitable[Any]) -> Trajectory:
    """Run a rollout that returns something else, and return the trajectory that it yielded with `yield_trajectory`.

    Raises:
        RuntimeError: the rollout yielded no trajectory.
    """
    taken: list[Trajectory] = []
    token = _yielded.set(taken)
    try:
        await awaitable
    finally:
        _yielded.reset(token)
    if not taken:
        raise RuntimeError("the rollout yielded no trajectory: it must call `art.yield_trajectory(trajectory)`")
    return taken[-1]
