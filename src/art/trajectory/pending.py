"""A group whose rollouts have not run yet, and how rollouts are cancelled, timed and reported."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from art.errors import TrajectoryError
from art.trajectory.record import Trajectory, infra_fault

G = TypeVar("G")


class RolloutObserver(Protocol):
    """Interface of an object that is told how each rollout of an awaited group ends, such as `GatherContext`."""

    rollout_timeout_s: float | None
    """Time limit of each rollout; `None` for no limit."""

    def rollout_finished(self, trajectory: Trajectory) -> None: ...

    def rollout_failed(self, error: Exception) -> None:
        """Count the failure. Raise `error` to stop when there are too many failures."""
        ...


rollout_observer: ContextVar[RolloutObserver | None] = ContextVar("rollout_observer", default=None)
"""Observer of the rollouts that this task starts. Without one, the first failed rollout of a group raises its error."""


class PendingGroup(Coroutine[Any, Any, G]):
    """A coroutine that runs all rollouts of a group at once and returns the finished group."""

    def __init__(self, make_group: Callable[[list[Any]], G], items: list[Any]) -> None:
        """
        Args:
            make_group: makes the group from trajectories and exceptions, when every rollout has ended.
            items: rollouts to await; anything else is passed to `make_group` unchanged.
        """
        self._items = items
        self.num_trajectories = len(items)
        self._coroutine = _run_group(make_group, items)

    def unfinished(self) -> list[tuple[int, Any]]:
        """Return the rollouts that have not ended, each with its index."""
        return [(i, item) for i, item in enumerate(self._items) if inspect.isawaitable(item) and not has_ended(item)]

    def __await__(self) -> Generator[Any, Any, G]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._close_items_if_unstarted()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._close_items_if_unstarted()
        self._coroutine.close()

    def _close_items_if_unstarted(self) -> None:
        if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED:
            close_unstarted(self._items)


async def _run_group(make_group: Callable[[list[Any]], G], items: list[Any]) -> G:
    """Run all rollouts. Failures become exceptions of the group, unless the observer raises.

    Cancelling this, or an error that ends it, cancels the rollouts and waits until they have ended.
    """
    observer = rollout_observer.get()
    limit_s = None if observer is None else observer.rollout_timeout_s
    outcomes = [asyncio.ensure_future(within(item, limit_s)) if inspect.isawaitable(item) else item for item in items]
    tasks = [outcome for outcome in outcomes if isinstance(outcome, asyncio.Future)]
    try:
        for finished in asyncio.as_completed(tasks):
            try:
                trajectory = await finished
            except Exception as error:
                if observer is None:
                    raise
                observer.rollout_failed(error)
            else:
                _report(trajectory, observer)
    except BaseException:
        await cancel_and_wait(tasks)
        close_unstarted(items)  # a rollout may have been cancelled before it began
        raise
    return make_group([_outcome(item) for item in outcomes])


def _report(trajectory: Any, observer: RolloutObserver | None) -> None:
    """
    Raises:
        TrajectoryError: the rollout returned something else than a trajectory.
    """
    if not isinstance(trajectory, (Trajectory, Mapping)):
        what = "None" if trajectory is None else f"a {type(trajectory).__name__}"
        raise TrajectoryError(f"a rollout of a group returned {what}; it must return an art.Trajectory")
    if observer is None:
        return
    if (fault := infra_fault(trajectory)) is not None:
        observer.rollout_failed(fault)
    elif isinstance(trajectory, Trajectory):
        observer.rollout_finished(trajectory)


def _outcome(item: Any) -> Any:
    if not isinstance(item, asyncio.Future):
        return item
    error = item.exception()
    return item.result() if error is None else error


async def within(rollout: Awaitable[Any], limit_s: float | None) -> Any:
    """Await a rollout for at most `limit_s` seconds; `None` is no limit.

    Raises:
        TimeoutError: it took longer.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await rollout
    except TimeoutError as error:
        if not limit.expired():
            raise  # the rollout raised it
        raise TimeoutError(f"a rollout took longer than {limit_s:g} s") from error


def has_ended(rollout: Awaitable[Any]) -> bool:
    """Whether a coroutine or task has ended. Of another awaitable nobody can tell, so it counts as running."""
    if inspect.iscoroutine(rollout):
        return inspect.getcoroutinestate(rollout) == inspect.CORO_CLOSED
    return isinstance(rollout, asyncio.Future) and rollout.done()


def close_unstarted(awaitables: Iterable[Any]) -> None:
    """Close coroutines that will never be awaited, so that Python does not warn about each of them."""
    for item in awaitables:
        if isinstance(item, Coroutine):
            item.close()


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks that still run and wait until they have ended; their results and errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
