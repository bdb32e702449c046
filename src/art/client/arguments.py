"""Checks of arguments. Errors say what was passed in place of groups, trajectories or rollouts, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any

from art.errors import TrajectoryError
from art.trajectory import PendingGroup, Trajectory, TrajectoryGroup, close_unstarted

_GATHER = "`groups = await art.gather_trajectory_groups(...)`"
_GATHER_LOOSE = "`trajectories = await art.gather_trajectories(...)`"
_GROUP = "`art.TrajectoryGroup(rollout(model, scenario) for _ in range(8))`"

_Advice = tuple[tuple[type, str], ...]
"""What to do about an argument, by its type: the first that fits, `object` for any other."""
_MAKE_GROUPS: _Advice = (
    (Awaitable, f"run the rollouts first, by {_GATHER}"),
    (Trajectory, "put the rollouts of one scenario into a group, `[art.TrajectoryGroup(trajectories)]`"),
    (BaseException, "a rollout that failed belongs in its group, `art.TrajectoryGroup([*trajectories, error])`"),
    (list, "make each list of trajectories a group, `art.TrajectoryGroup(trajectories)`"),
    (object, f"pass what {_GATHER} gives"),
)
_MAKE_TRAJECTORIES: _Advice = (
    (Awaitable, f"run the rollouts first, by {_GATHER_LOOSE}"),
    (
        TrajectoryGroup,
        "pass the trajectories of the groups, `[trajectory for group in groups for trajectory in group]`",
    ),
    (BaseException, "leave out rollouts that failed"),
    (
        object,
        'make a trajectory of each conversation, `art.Trajectory(messages_and_choices=[{"role": "user", "content": '
        '...}, {"role": "assistant", "content": ...}])`',
    ),
)
_LOG: _Advice = (
    (Awaitable, f"run the rollouts first, by {_GATHER_LOOSE}"),
    (object, "numbers without rollouts are logged as `metrics={...}`"),
)
_MAKE_PENDING_GROUPS: _Advice = (
    (Trajectory, "put the rollouts of one scenario into a group, `art.TrajectoryGroup(trajectories)`"),
    (object, f"each item is the group of one scenario, {_GROUP}"),
)
_MAKE_ROLLOUTS: _Advice = (
    (Trajectory, "it has run already and needs no gathering"),
    (object, "pass calls of your rollout that are not awaited, `(rollout(model, scenario) for scenario in scenarios)`"),
)


def check_groups(groups: Any) -> list[TrajectoryGroup]:
    """Return the groups to train on as a list. For anything else a `TrajectoryError` says how to make groups of it."""
    if isinstance(groups, TrajectoryGroup):
        raise TrajectoryError("`trajectory_groups` is one TrajectoryGroup; put it into a list: `[group]`")
    return _check("trajectory_groups", groups, (TrajectoryGroup,), "TrajectoryGroup", _MAKE_GROUPS)


def check_trajectories(trajectories: Any, name: str = "trajectories") -> list[Trajectory]:
    """Return the trajectories to fine-tune on, the argument `name`, as a list. For anything else a `TrajectoryError`
    says what to do."""
    if isinstance(trajectories, TrajectoryGroup):
        return list(trajectories)
    if isinstance(trajectories, Trajectory):
        raise TrajectoryError(f"`{name}` is one Trajectory; put it into a list: `[trajectory]`")
    return _check(name, trajectories, (Trajectory,), "Trajectory", _MAKE_TRAJECTORIES)


def check_logged(trajectories: Any) -> list[Any]:
    """Return groups, or loose trajectories and exceptions, as a list; anything else is a `TrajectoryError`."""
    if isinstance(trajectories, (Trajectory, TrajectoryGroup)):
        return [trajectories]
    kinds = (TrajectoryGroup, Trajectory, BaseException)
    return _check("trajectories", trajectories, kinds, "TrajectoryGroup or Trajectory", _LOG)


def check_pending_groups(groups: Any) -> list[Any]:
    """Return groups that may not have run yet as a list; anything else is a `TrajectoryError`."""
    if isinstance(groups, (TrajectoryGroup, PendingGroup)):
        _discard(groups)
        raise TrajectoryError("`groups` is one group; put it into a list: `[art.TrajectoryGroup(...)]`")
    return _check("groups", groups, (Awaitable, TrajectoryGroup), "TrajectoryGroup", _MAKE_PENDING_GROUPS)


def check_rollouts(rollouts: Any) -> list[Any]:
    """Return rollouts that were not awaited as a list; anything else is a `TrajectoryError`."""
    if isinstance(rollouts, Awaitable):
        _discard(rollouts)
        raise TrajectoryError("`trajectories` is one rollout; put it into a list: `[rollout(model, scenario)]`")
    return _check("trajectories", rollouts, (Awaitable,), "rollout", _MAKE_ROLLOUTS)


def check_rollout_result(result: Any) -> list[Any]:
    """Return the trajectories of a rollout, one or several, as a list; anything else is a `TrajectoryError`."""
    if isinstance(result, Trajectory):
        return [result]
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping)):
        raise TrajectoryError(f"a rollout returned {describe(result)}; it must return an art.Trajectory, or several")
    return list(result)


def check_group_result(result: Any) -> TrajectoryGroup | None:
    """Return the group that an awaitable gave, or `None` if it failed; anything else is a `TrajectoryError`."""
    if result is None or isinstance(result, TrajectoryGroup):
        return result
    raise TrajectoryError(
        f"an item of `groups` gave {describe(result)}, not a TrajectoryGroup: put the rollouts of one scenario into a "
        f"group, {_GROUP}, or run loose ones by {_GATHER_LOOSE}"
    )


def check_kept(name: str, kept: Any) -> list[TrajectoryGroup]:
    """Make a list of the groups that the callback `name` returned: one group, a list of groups, or `None` for none.

    Raises:
        TrajectoryError: the callback returned something else.
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


def _check(name: str, items: Any, kinds: tuple[Any, ...], kind: str, advice: _Advice) -> list[Any]:
    def what_to_do(item: Any) -> str:
        return next(text for fitting, text in advice if isinstance(item, fitting))

    if isinstance(items, (Awaitable, str, bytes, Mapping, Trajectory)) or not isinstance(items, Iterable):
        _discard(items)
        raise TrajectoryError(f"`{name}` is {describe(items)}, not a list of {kind}: {what_to_do(items)}")
    listed = list(items)
    wrong = next((i for i, item in enumerate(listed) if not isinstance(item, kinds)), None)
    if wrong is not None:
        close_unstarted(listed)
        item = listed[wrong]
        for part in item if isinstance(item, (list, tuple)) else ():
            _discard(part)
        raise TrajectoryError(f"`{name}[{wrong}]` is {describe(item)}, not a {kind}: {what_to_do(item)}")
    return listed


def _discard(item: Any) -> None:
    """Close a coroutine that will not be awaited, and coroutines in its arguments: Python warns about each."""
    if inspect.iscoroutine(item) and inspect.getcoroutinestate(item) == inspect.CORO_CREATED:
        for argument in inspect.getcoroutinelocals(item).values():
            close_unstarted(argument if isinstance(argument, (list, tuple)) else ())
    close_unstarted([item])
