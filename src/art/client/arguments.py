"""Checks of arguments: a `TrajectoryError` says what was passed instead of groups or rollouts, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any

from art.errors import TrajectoryError
from art.trajectory import PendingGroup, Trajectory, TrajectoryGroup, close_unstarted

GROUP_EXAMPLE = "`art.TrajectoryGroup(rollout(model, scenario) for _ in range(8))`"
_LOOSE = "`trajectories = await art.gather_trajectories(...)`"


def check_groups(groups: Any) -> list[TrajectoryGroup]:
    """Return the groups to train on as a list. For anything else a `TrajectoryError` says how to make groups of it."""
    advice = (
        "pass what `groups = await art.gather_trajectory_groups(...)` gives, a list of groups. The rollouts of one "
        "scenario, with the errors of those that failed, are a group: `[art.TrajectoryGroup(trajectories)]`"
    )
    return _check("trajectory_groups", groups, (TrajectoryGroup,), "TrajectoryGroup", advice)


def check_trajectories(trajectories: Any, name: str = "trajectories") -> list[Trajectory]:
    """Return the trajectories to fine-tune on, the argument `name`, as a list."""
    if isinstance(trajectories, TrajectoryGroup):
        return list(trajectories)
    advice = (
        f"pass what {_LOOSE} gives, without failed rollouts, or `[trajectory for group in groups for trajectory in "
        'group]`, or make a trajectory of each conversation, `art.Trajectory(messages_and_choices=[{"role": "user", '
        '"content": ...}, {"role": "assistant", "content": ...}])`'
    )
    return _check(name, trajectories, (Trajectory,), "Trajectory", advice)


def check_logged(trajectories: Any) -> list[Any]:
    """Return groups, or loose trajectories and exceptions, as a list."""
    if isinstance(trajectories, (Trajectory, TrajectoryGroup)):
        return [trajectories]
    kinds = (TrajectoryGroup, Trajectory, BaseException)
    advice = f"pass what {_LOOSE} gives; numbers without rollouts are logged as `metrics={{...}}`"
    return _check("trajectories", trajectories, kinds, "TrajectoryGroup or Trajectory", advice)


def check_pending_groups(groups: Any) -> list[Any]:
    """Return groups that may not have run yet as a list."""
    advice = f"each item of the list is the group of one scenario, {GROUP_EXAMPLE}"
    return _check("groups", groups, (Awaitable, TrajectoryGroup), "TrajectoryGroup", advice)


def check_rollouts(rollouts: Any) -> list[Any]:
    """Return rollouts that were not awaited as a list."""
    advice = "pass calls of your rollout that are not awaited, `[rollout(model, scenario) for scenario in scenarios]`"
    return _check("trajectories", rollouts, (Awaitable,), "rollout", advice)


def describe(item: Any) -> str:
    """Describe an argument in a few words."""
    if item is None:
        return "None"
    if isinstance(item, Awaitable):
        return f"a {'group' if isinstance(item, PendingGroup) else 'coroutine'} that was not awaited"
    name = type(item).__name__
    text = f": {item!r}" if isinstance(item, (str, int, float, BaseException)) else ""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}{text[:60]}"


def _check(name: str, items: Any, kinds: tuple[Any, ...], kind: str, advice: str) -> list[Any]:
    if isinstance(items, (Awaitable, str, bytes, Mapping, Trajectory, TrajectoryGroup)) or not isinstance(
        items, Iterable
    ):
        _discard(items)
        raise TrajectoryError(f"`{name}` is {describe(items)}, not a list of {kind}: {advice}")
    listed = list(items)
    wrong = next((i for i, item in enumerate(listed) if not isinstance(item, kinds)), None)
    if wrong is not None:
        close_unstarted(listed)
        item = listed[wrong]
        for part in item if isinstance(item, (list, tuple)) else ():
            _discard(part)
        raise TrajectoryError(f"`{name}[{wrong}]` is {describe(item)}, not a {kind}: {advice}")
    return listed


def _discard(item: Any) -> None:
    """Close a coroutine that will not be awaited, and coroutines in its arguments: Python warns about each."""
    if inspect.iscoroutine(item) and inspect.getcoroutinestate(item) == inspect.CORO_CREATED:
        for argument in inspect.getcoroutinelocals(item).values():
            close_unstarted(argument if isinstance(argument, (list, tuple)) else ())
    close_unstarted([item])
