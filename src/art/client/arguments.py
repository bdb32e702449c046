"""Checks of arguments. Errors say what was passed in place of groups, trajectories or rollouts, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from art.errors import TrajectoryError
from art.trajectory import PendingGroup, Trajectory, TrajectoryGroup, close_unstarted

_GATHER = "`groups = await art.gather_trajectory_groups(...)`"
_GATHER_LOOSE = "`trajectories = await art.gather_trajectories(...)`"
_GROUP = "`art.TrajectoryGroup(rollout(model, scenario) for _ in range(8))`"


def check_groups(groups: Any) -> list[TrajectoryGroup]:
    """Return the groups to train on as a list.

    Raises:
        TrajectoryError: the argument is something else; the message says what, and how to make groups of it.
    """
    if isinstance(groups, TrajectoryGroup):
        raise TrajectoryError("`trajectory_groups` is one TrajectoryGroup; put it into a list: `[group]`")
    return _check("trajectory_groups", groups, (TrajectoryGroup,), "TrajectoryGroup", _how_to_make_groups)


def check_trajectories(trajectories: Any) -> list[Trajectory]:
    """Return the trajectories to fine-tune on as a list.

    Raises:
        TrajectoryError: the argument is something else; the message says what, and how to make trajectories of it.
    """
    if isinstance(trajectories, TrajectoryGroup):
        return list(trajectories)
    if isinstance(trajectories, Trajectory):
        raise TrajectoryError("`trajectories` is one Trajectory; put it into a list: `[trajectory]`")
    return _check("trajectories", trajectories, (Trajectory,), "Trajectory", _how_to_make_trajectories)


def check_logged(trajectories: Any) -> list[Any]:
    """Return the argument of `model.log` as a list: groups, or loose trajectories and exceptions.

    Raises:
        TrajectoryError: the argument is something else.
    """
    if isinstance(trajectories, (Trajectory, TrajectoryGroup)):
        return [trajectories]
    kinds = (TrajectoryGroup, Trajectory, BaseException)
    return _check("trajectories", trajectories, kinds, "TrajectoryGroup or Trajectory", _how_to_log)


def check_pending_groups(groups: Any) -> list[Any]:
    """Return the argument of `gather_trajectory_groups` as a list.

    Raises:
        TrajectoryError: the argument is something else.
    """
    if isinstance(groups, (TrajectoryGroup, PendingGroup)):
        _discard(groups)
        raise TrajectoryError("`groups` is one group; put it into a list: `[art.TrajectoryGroup(...)]`")
    return _check("groups", groups, (Awaitable, TrajectoryGroup), "TrajectoryGroup", _how_to_make_pending_groups)


def check_rollouts(rollouts: Any) -> list[Any]:
    """Return the argument of `gather_trajectories` as a list.

    Raises:
        TrajectoryError: the argument is something else.
    """
    if isinstance(rollouts, Awaitable):
        _discard(rollouts)
        raise TrajectoryError("`trajectories` is one rollout; put it into a list: `[rollout(model, scenario)]`")
    return _check("trajectories", rollouts, (Awaitable,), "rollout", _how_to_make_rollouts)


def check_rollout_result(result: Any) -> list[Any]:
    """Return the trajectories of a rollout, one or several, as a list.

    Raises:
        TrajectoryError: the result is something else.
    """
    if isinstance(result, Trajectory):
        return [result]
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping)):
        raise TrajectoryError(f"a rollout returned {describe(result)}; it must return an art.Trajectory, or several")
    return list(result)


def check_group_result(result: Any) -> TrajectoryGroup | None:
    """Return the group that an awaitable gave, or `None` if it failed.

    Raises:
        TrajectoryError: the result is something else.
    """
    if result is None or isinstance(result, TrajectoryGroup):
        return result
    raise TrajectoryError(
        f"an item of `groups` gave {describe(result)}, not a TrajectoryGroup: put the rollouts of one scenario into a "
        f"group, {_GROUP}, or run loose ones by {_GATHER_LOOSE}"
    )


def check_kept(name: str, kept: Any) -> list[TrajectoryGroup]:
    """Return the groups to keep as a list; the callback `name` returned one, several, or `None` for none.

    Raises:
        TrajectoryError: the result is something else.
    """
    groups = [] if kept is None else kept if isinstance(kept, list) else [kept]
    for group in groups:
        if not isinstance(group, TrajectoryGroup):
            raise TrajectoryError(
                f"`{name}` returned {describe(group)}; return the group to keep, a list of groups, or None"
            )
    return groups


def describe(item: Any) -> str:
    """Describe an argument in a few words."""
    if item is None:
        return "None"
    if isinstance(item, Awaitable):
        return f"a {'group' if isinstance(item, PendingGroup) else 'coroutine'} that was not awaited"
    name = type(item).__name__
    text = f": {item!r}" if isinstance(item, (str, int, float, BaseException)) else ""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}{text[:60]}"


def _check(name: str, items: Any, kinds: tuple[Any, ...], kind: str, hint: Callable[[Any], str]) -> list[Any]:
    if isinstance(items, (Awaitable, str, bytes, Mapping, Trajectory)) or not isinstance(items, Iterable):
        _discard(items)
        raise TrajectoryError(f"`{name}` is {describe(items)}, not a list of {kind}: {hint(items)}")
    listed = list(items)
    wrong = next((i for i, item in enumerate(listed) if not isinstance(item, kinds)), None)
    if wrong is not None:
        close_unstarted(listed)
        item = listed[wrong]
        for part in item if isinstance(item, (list, tuple)) else ():
            _discard(part)
        raise TrajectoryError(f"`{name}[{wrong}]` is {describe(item)}, not a {kind}: {hint(item)}")
    return listed


def _discard(item: Any) -> None:
    """Close a coroutine that will not be awaited, and coroutines in its arguments: Python warns about each."""
    if inspect.iscoroutine(item) and inspect.getcoroutinestate(item) == inspect.CORO_CREATED:
        for argument in inspect.getcoroutinelocals(item).values():
            close_unstarted(argument if isinstance(argument, (list, tuple)) else ())
    close_unstarted([item])


def _how_to_make_groups(item: Any) -> str:
    if isinstance(item, Awaitable):
        return f"run the rollouts first, by {_GATHER}"
    if isinstance(item, Trajectory):
        return "put the rollouts of one scenario into a group, `[art.TrajectoryGroup(trajectories)]`"
    if isinstance(item, BaseException):
        return "a rollout that failed belongs in its group, `art.TrajectoryGroup([*trajectories, error])`"
    if isinstance(item, list):
        return "make each list of trajectories a group, `art.TrajectoryGroup(trajectories)`"
    return f"pass what {_GATHER} gives"


def _how_to_make_trajectories(item: Any) -> str:
    if isinstance(item, Awaitable):
        return f"run the rollouts first, by {_GATHER_LOOSE}"
    if isinstance(item, TrajectoryGroup):
        return "pass the trajectories of the groups, `[trajectory for group in groups for trajectory in group]`"
    if isinstance(item, BaseException):
        return "leave out rollouts that failed"
    return (
        'make a trajectory of each conversation, `art.Trajectory(messages_and_choices=[{"role": "user", "content": '
        '...}, {"role": "assistant", "content": ...}])`'
    )


def _how_to_log(item: Any) -> str:
    if isinstance(item, Awaitable):
        return f"run the rollouts first, by {_GATHER_LOOSE}"
    return "numbers without rollouts are logged as `metrics={...}`"


def _how_to_make_pending_groups(item: Any) -> str:
    if isinstance(item, Trajectory):
        return "put the rollouts of one scenario into a group, `art.TrajectoryGroup(trajectories)`"
    return f"each item is the group of one scenario, {_GROUP}"


def _how_to_make_rollouts(item: Any) -> str:
    if isinstance(item, Trajectory):
        return "it has run already and needs no gathering"
    return "pass calls of your rollout that are not awaited, `(rollout(model, scenario) for scenario in scenarios)`"
