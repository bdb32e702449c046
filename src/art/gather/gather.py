"""Running many rollouts at once.

    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(model, s) for _ in range(8)) for s in scenarios), max_exceptions=4
    )

All rollouts run concurrently. A rollout that raises is counted; one failure more than `max_exceptions` ends everything.
While it waits, the log names every `REPORT_AFTER_S` seconds the rollouts that it waits for.
With `faults=`, a `FaultWatch`, the share of failures over the most recent rollouts decides instead, across gathers, and
a group that cannot be scored counts as failed rollouts.
An error, Ctrl-C or cancellation ends a gather early: the other rollouts are cancelled, and it waits for their end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, Unpack, cast

from art.client.arguments import (
    check_group_result,
    check_kept,
    check_pending_groups,
    check_rollout_result,
    check_rollouts,
)
from art.client.waiting import announce_wait, progress_bar
from art.compat.gather import OlderOptions, check_older_options
from art.gather.context import GatherContext, get_gather_context, set_gather_context
from art.gather.faults import FaultWatch, is_own
from art.trajectory import (
    PendingGroup,
    Trajectory,
    TrajectoryGroup,
    cancel_and_wait,
    close_unstarted,
    has_ended,
    infra_fault,
    within,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
REPORT_AFTER_S = 60.0
"""Seconds between two reports about the rollouts that a gather waits for, as in a pipeline."""
_MOST_NAMED = 3
AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]


async def wrap_group_awaitable(awaitable: Awaitable[T]) -> T | None:
    """Await a group, or anything that iterates over trajectories, and report it to the surrounding gather.

    Returns:
        The result, or `None` for a failure that the gather tolerates.
    """
    if isinstance(awaitable, PendingGroup):
        return cast("T", await awaitable)  # reports each of its rollouts itself
    context = get_gather_context()
    try:
        result = await awaitable
    except Exception as error:
        context.rollout_failed(error)
        return None
    if isinstance(result, Iterable):
        for trajectory in result:
            if isinstance(trajectory, Trajectory):
                context.rollout_finished(trajectory)
    return result


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup] | TrajectoryGroup],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
    faults: FaultWatch | None = None,
    rollout_timeout_s: float | None = None,
    **older: Unpack[OlderOptions],
) -> list[TrajectoryGroup]:
    """Run all rollouts of all groups and return the groups in input order.

    A group without any trajectory is left out: its failures were counted, and there is nothing to compare.

    Args:
        groups: usually `TrajectoryGroup(coroutines)`, not awaited. Any awaitable of a group and finished groups are
            accepted too.
        pbar_desc: label of the progress bar, `None` for no bar.
        max_exceptions: failed rollouts to tolerate; below 1 it is a share of all rollouts.
        max_metrics: number of metrics that the bar shows.
        after_each: called with each finished group; returns the group to keep, several, or `None` to drop it.
        faults: decides how many failures are too many, instead of `max_exceptions`, and counts them for the log.
        rollout_timeout_s: time limit of each rollout of a `TrajectoryGroup(coroutines)`; by default there is none. A
            late rollout is cancelled and counts as failed.
        older: options of older code, see `art.compat.gather`.
    """
    check_older_options(older)
    groups = check_pending_groups(groups)
    context = GatherContext(
        max_exceptions=max_exceptions, max_metrics=max_metrics, faults=faults, rollout_timeout_s=rollout_timeout_s
    )
    total = sum(num_rollouts_of(group) for group in groups)
    with progress_bar(pbar_desc, total) as context.pbar, set_gather_context(context):
        results = await _all_or_nothing(groups, lambda group: finish_group(group, after_each))
    return [group for kept in results for group in kept]


def num_rollouts_of(group: Any) -> int:
    """Number of rollouts of a group that was not awaited; 1 for any other awaitable."""
    return group.num_trajectories if isinstance(group, PendingGroup) else 1


async def finish_group(
    group: Awaitable[TrajectoryGroup] | TrajectoryGroup, after_each: AfterEach | None
) -> list[TrajectoryGroup]:
    """Await one group and pass it to the callback `after_each`. Returns the groups to keep: none, one or several."""
    finished = check_group_result(group if isinstance(group, TrajectoryGroup) else await wrap_group_awaitable(group))
    if finished is None or len(finished) == 0:
        logger.warning("dropped a group: none of its rollouts returned a trajectory")
        return []
    try:
        kept = finished if after_each is None else await after_each(finished)
    except Exception as error:
        get_gather_context().group_failed(finished, error)
        return []
    groups = check_kept("after_each", kept)
    return [rest for one in groups for rest in get_gather_context().without_unscored(one)]


async def gather_trajectories(
    trajectories: Iterable[Awaitable[T]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    faults: FaultWatch | None = None,
    rollout_timeout_s: float | None = None,
    **older: Unpack[OlderOptions],
) -> list[T]:
    """Run rollouts that are not grouped; each returns a trajectory or several.

    The options are those of `gather_trajectory_groups`.

    Returns:
        The results in input order. A rollout whose failure was tolerated gives its exception.
    """
    check_older_options(older)
    rollouts = check_rollouts(trajectories)
    context = GatherContext(max_exceptions=max_exceptions, faults=faults, rollout_timeout_s=rollout_timeout_s)
    with progress_bar(pbar_desc, len(rollouts)) as context.pbar, set_gather_context(context):
        return cast(list[T], await _all_or_nothing(rollouts, lambda rollout: _outcome(rollout, context)))


async def _outcome(rollout: Awaitable[Any], context: GatherContext) -> Any:
    try:
        result = await within(rollout, context.rollout_timeout_s)
    except Exception as error:
        context.rollout_failed(error)
        return error
    if (fault := infra_fault(result)) is not None:
        context.rollout_failed(fault)
        return fault
    for trajectory in check_rollout_result(result):
        context.rollout_finished(trajectory)
    return result


async def _all_or_nothing(items: list[Any], run: Callable[[Any], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run every item and return the results in order. The first error, or cancellation, cancels all and waits."""
    tasks = [asyncio.create_task(run(item)) for item in items]
    try:
        with report_waiting(items):
            return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_and_wait(tasks)
        close_unstarted(items)
        raise


def report_waiting(items: Sequence[Any]) -> AbstractContextManager[None]:
    """Context manager: log every `REPORT_AFTER_S` seconds which of these rollouts and groups have not ended."""
    return announce_wait(lambda: _unfinished(items), every_s=REPORT_AFTER_S, longest_s=REPORT_AFTER_S)


def _unfinished(items: Sequence[Any]) -> str:
    """Name the first rollouts that have not ended, each with the line of the user's program in which it waits."""
    names = []
    for number, item in enumerate(items):
        if isinstance(item, PendingGroup):
            names += [f"rollout {i} of group {number}{_line_of(one)}" for i, one in item.unfinished()]
        elif not has_ended(item):
            names.append(f"rollout {number}{_line_of(item)}")
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more if names else "`after_each`: all rollouts have ended"


def _line_of(rollout: Any) -> str:
    line = ""
    while (frame := getattr(rollout, "cr_frame", None)) is not None:
        if is_own(frame.f_code.co_filename):
            line = f" ({frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name})"
        rollout = rollout.cr_await
    return line
