"""Running many rollouts at once.

    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(model, s) for _ in range(8)) for s in scenarios), max_exceptions=4
    )

All rollouts run concurrently. A rollout that raises is counted; one failure more than `max_exceptions` ends everything.
While it waits, the log says every `REPORT_AFTER_S` seconds how much of it has not ended.
With `faults=`, a `FaultWatch`, the share of failures over the most recent rollouts decides instead, across gathers, and
a group that cannot be scored counts as failed rollouts.
An error, Ctrl-C or cancellation ends a gather early: the other rollouts are cancelled, and it waits for their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar, cast

from art.client.arguments import GROUP_EXAMPLE, check_pending_groups, check_rollouts, describe
from art.client.terminal import announce_wait, progress_bar
from art.errors import ArtError, JudgeError, RolloutError, TrajectoryError
from art.faults import FailureLog, FaultWatch, raise_if_fatal
from art.messages import is_choice
from art.rollout_workers import Workers, move_to
from art.trajectory import (
    PendingGroup,
    PydanticException,
    Trajectory,
    TrajectoryGroup,
    cancel_and_wait,
    close_unstarted,
    finite_number,
    has_ended,
    infra_fault,
    rollout_observer,
    within,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
REPORT_AFTER_S = 60.0
"""Seconds between two reports about the rollouts that a gather waits for, as in a pipeline."""
AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]
_HOW_TO_GO_ON = (
    "This is one failure more than the gather tolerates. To go on without rollouts that fail, pass max_exceptions= "
    "(for batches max_batch_exceptions=), a number or below 1 a share of the rollouts, or faults=art.FaultWatch()"
)


@dataclass
class CountBudget:
    """Counts the failed rollouts of one gather. The first failure above `max_exceptions` raises its error."""

    context: GatherContext
    max_exceptions: float = 0
    """A number of failures, or below 1 a share of `num_rollouts`."""
    num_rollouts: int | None = None
    """Number of rollouts that a share refers to; by default the total of the progress bar."""
    num_failed: int = 0
    last_error: Exception | None = None
    failures: FailureLog = field(default_factory=FailureLog)

    def count(self, trajectory: Trajectory) -> None:
        """Do nothing: only failures count."""

    def failed(self, error: Exception) -> None:
        """Count a failed rollout."""
        self.num_failed += 1
        self.last_error = error
        self.raise_if_exceeded()

    def lost(self, error: Exception) -> None:
        """Count a rollout that returned a trajectory, but has no usable reward."""
        self.failed(error)

    def group_lost(self, group: TrajectoryGroup, error: Exception) -> None:
        """Count a group that could not be scored as one failure. Raise any error that is not transient or a judge's."""
        if not isinstance(error, JudgeError) and not (isinstance(error, ArtError) and error.transient):
            raise error
        self.failed(error)

    def raise_if_exceeded(self) -> None:
        """Raise the last error if there are more failures than are tolerated."""
        limit, error = self.max_exceptions, self.last_error
        if 0 < limit < 1:
            limit *= self.num_rollouts or getattr(self.context.pbar, "total", None) or 0
        if error is not None and self.num_failed > limit:
            if _HOW_TO_GO_ON not in getattr(error, "__notes__", ()):
                error.add_note(_HOW_TO_GO_ON)
            raise error


class GatherContext:
    """Progress and failures of one gather (a run of many rollouts). Never share one between two gathers."""

    def __init__(
        self,
        pbar: Any = None,
        *,
        max_exceptions: float = 0,
        max_metrics: int | None = None,
        num_rollouts: int | None = None,
        faults: FaultWatch | None = None,
        rollout_timeout_s: float | None = None,
    ) -> None:
        """
        Args:
            pbar: a tqdm bar that shows running means.
            max_exceptions: failures to tolerate: a count, or below 1 a share of the rollouts.
            max_metrics: number of metrics that the bar shows beside the reward.
            num_rollouts: rollouts that a share in `max_exceptions` refers to; by default the total of the bar.
            faults: decides how many failures are too many, instead of `max_exceptions`.
            rollout_timeout_s: time limit of each rollout.
        """
        self.pbar, self.max_metrics = pbar, max_metrics
        self.metric_sums: Counter[str] = Counter()
        """Sum of each metric over the rollouts that have finished; `exceptions` counts failures."""
        self.metric_divisors: Counter[str] = Counter()
        """Number of rollouts that had the metric."""
        self.budget = CountBudget(self, max_exceptions, num_rollouts)
        self.policy: CountBudget | FaultWatch = self.budget if faults is None else faults
        self.rollout_timeout_s = rollout_timeout_s
        self._seen: dict[int, Trajectory] = {}

    @property
    def max_exceptions(self) -> float:
        return self.budget.max_exceptions

    def rollout_finished(self, trajectory: Trajectory) -> None:
        """Count a trajectory. A second report of the same trajectory is ignored."""
        if id(trajectory) in self._seen:
            return
        self._seen[id(trajectory)] = trajectory
        self.policy.count(trajectory)
        choices = [item for item in trajectory.messages_and_choices if is_choice(item)]
        counts = [len(choice.logprobs.content) for choice in choices if choice.logprobs and choice.logprobs.content]
        if counts:  # the mean tokens per answer, if log-probs tell it and the user has not
            trajectory.metrics.setdefault("completion_tokens", sum(counts) / len(counts))
        for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
            if (number := finite_number(value)) is not None:
                self.metric_sums[name] += number  # type: ignore[assignment]
                self.metric_divisors[name] += 1
        self.show()

    def rollout_failed(self, error: Exception) -> None:
        """Count a failed rollout.

        Raises:
            Exception: `error` itself, if it is one more than `max_exceptions` allows, or what `raise_if_fatal` raises.
            FaultRateError: it is one more than `faults` allows.
        """
        self.metric_sums["exceptions"] += 1
        self.show()
        raise_if_fatal(error)
        if "'coroutine' object" in str(error):
            error.add_note("(was `await` forgotten?)")
        self.policy.failed(error)
        self.policy.failures.add(error)

    def group_failed(self, group: TrajectoryGroup, error: Exception) -> None:
        """Count a group whose `after_each` callback raised `error`. The group is dropped.

        Raises:
            Exception: `error` itself, if it must not be tolerated.
            FaultRateError: too many recent rollouts failed, including those of this group.
        """
        raise_if_fatal(error)
        self.policy.group_lost(group, error)
        self.metric_sums["exceptions"] += 1
        logger.warning("dropped a group, because scoring it failed: %s: %s", type(error).__name__, error)

    def without_unscored(self, group: TrajectoryGroup) -> list[TrajectoryGroup]:
        """Move rollouts whose reward is not a finite number to the `exceptions` of their group.

        The list that is returned has the group, and is empty if no rollout is left.

        Raises:
            RolloutError: there are more failures than `max_exceptions` allows.
            FaultRateError: there are more than `faults` allows.
        """
        unscored = [trajectory for trajectory in group if finite_number(trajectory.reward) is None]
        if not unscored:
            return [group]
        errors = [RolloutError(f"a rollout has the reward {t.reward!r}, which is no finite number") for t in unscored]
        for error in errors:
            self.metric_sums["exceptions"] += 1
            self.policy.lost(error)
        logger.warning("dropped %d rollouts: %s; check the reward function", len(errors), errors[0])
        scored = [trajectory for trajectory in group if finite_number(trajectory.reward) is not None]
        failed = [*group.exceptions, *map(PydanticException.from_exception, errors)]
        return [group.model_copy(update={"trajectories": scored, "exceptions": failed})] if scored else []

    def add(self, part: GatherContext) -> None:
        """Add what the context of one finished group has counted.

        Raises:
            Exception: the last failure of `part`, if together they are too many.
        """
        self.metric_sums.update(part.metric_sums)
        self.metric_divisors.update(part.metric_divisors)
        self.show()
        self.budget.num_failed += part.budget.num_failed
        self.budget.last_error = part.budget.last_error
        self.budget.raise_if_exceeded()

    @property
    def num_exceptions(self) -> int:
        return int(self.metric_sums["exceptions"])

    def show(self) -> None:
        """Advance the bar by one and show the means, with the number of rollouts where not all have the metric."""
        if self.pbar is None:
            return
        names = [name for name in self.metric_divisors if name != "reward"][: self.max_metrics]
        shown = ["reward", *names] if "reward" in self.metric_divisors else names
        means: dict[str, Any] = {name: self.metric_sums[name] / self.metric_divisors[name] for name in shown}
        most = max(self.metric_divisors.values(), default=0)
        means |= {
            name: f"{means[name]:.3g} ({count} of {most})"
            for name in shown
            if (count := self.metric_divisors[name]) < most
        }
        if self.num_exceptions:
            means["exceptions"] = self.num_exceptions
        self.pbar.set_postfix(means, refresh=False)
        self.pbar.update(1)

    def close_bar(self) -> None:
        if self.pbar is not None:
            self.pbar.close()


def get_gather_context() -> GatherContext:
    """Return the context of the surrounding gather, or else a new context that tolerates no failure."""
    current = rollout_observer.get()
    return current if isinstance(current, GatherContext) else GatherContext()


@contextlib.contextmanager
def set_gather_context(context: GatherContext) -> Iterator[None]:
    """Context manager: report the rollouts that are started inside it to `context`."""
    token = rollout_observer.set(context)
    try:
        yield
    finally:
        rollout_observer.reset(token)


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
    workers: Workers | None = None,
    pbar_total_completion_tokens: bool = False,
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
        workers: runs the rollouts in processes of its own, such as `art.RayWorkers(8)`. By default they are tasks of
            this event loop.
        pbar_total_completion_tokens: has no effect, as in ART 0.5, and a warning says so.
    """
    _warn_of_older_option(pbar_total_completion_tokens)
    groups = move_to(workers, check_pending_groups(groups))
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
    finished = group if isinstance(group, TrajectoryGroup) else await wrap_group_awaitable(group)
    if finished is not None and not isinstance(finished, TrajectoryGroup):
        raise TrajectoryError(
            f"an item of `groups` gave {describe(finished)}, not a TrajectoryGroup: put the rollouts of one scenario "
            f"into a group, {GROUP_EXAMPLE}, or run loose ones by `art.gather_trajectories(...)`"
        )
    if finished is None or len(finished) == 0:
        logger.warning("dropped a group: none of its rollouts returned a trajectory")
        return []
    try:
        kept = finished if after_each is None else await after_each(finished)
    except Exception as error:
        get_gather_context().group_failed(finished, error)
        return []
    groups = [] if kept is None else kept if isinstance(kept, list) else [kept]
    if wrong := [one for one in groups if not isinstance(one, TrajectoryGroup)]:
        raise TrajectoryError(
            f"`after_each` returned {describe(wrong[0])}; return the group to keep, a list of groups, or None"
        )
    return [rest for one in groups for rest in get_gather_context().without_unscored(one)]


async def gather_trajectories(
    trajectories: Iterable[Awaitable[T]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    faults: FaultWatch | None = None,
    rollout_timeout_s: float | None = None,
    workers: Workers | None = None,
    pbar_total_completion_tokens: bool = False,
) -> list[T]:
    """Run rollouts that are not grouped; each returns a trajectory or several.

    The options are those of `gather_trajectory_groups`.

    Returns:
        The results in input order. A rollout whose failure was tolerated gives its exception.
    """
    _warn_of_older_option(pbar_total_completion_tokens)
    rollouts = move_to(workers, check_rollouts(trajectories))
    context = GatherContext(max_exceptions=max_exceptions, faults=faults, rollout_timeout_s=rollout_timeout_s)

    async def run(rollout: Awaitable[Any]) -> Any:
        try:
            result = await within(rollout, rollout_timeout_s)
        except Exception as error:
            context.rollout_failed(error)
            return error
        if (fault := infra_fault(result)) is not None:
            context.rollout_failed(fault)
            return fault
        if not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping)):
            raise TrajectoryError(
                f"a rollout returned {describe(result)}; it must return an art.Trajectory, or several"
            )
        for trajectory in [result] if isinstance(result, Trajectory) else result:
            context.rollout_finished(trajectory)
        return result

    with progress_bar(pbar_desc, len(rollouts)) as context.pbar, set_gather_context(context):
        return cast(list[T], await _all_or_nothing(rollouts, run))


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
    """Context manager: log every `REPORT_AFTER_S` seconds how many of these rollouts and groups have not ended."""

    def describe() -> str:
        waiting = (item.num_unfinished() if isinstance(item, PendingGroup) else not has_ended(item) for item in items)
        return f"{num} rollouts" if (num := sum(waiting)) else "`after_each`: all rollouts have ended"

    return announce_wait(describe, every_s=REPORT_AFTER_S, longest_s=REPORT_AFTER_S)


async def trajectory_group_batches(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    batch_size: int,
    max_batch_exceptions: float = 0,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    pbar_desc: str | None = "batches",
    faults: FaultWatch | None = None,
    rollout_timeout_s: float | None = None,
    pbar_total_completion_tokens: bool = False,
) -> AsyncGenerator[list[TrajectoryGroup], None]:
    """Yield lists of `batch_size` finished groups, in the order in which they finish; the last may be shorter.

    Args:
        groups: awaitables of groups. From a generator only those groups are taken that are started.
        max_batch_exceptions: failed rollouts to tolerate for each batch; below 1 a share of its rollouts.
        max_concurrent_batches: up to `max_concurrent_batches * batch_size` groups run at once.
        skip_batches: number of batches whose inputs are skipped, to continue an earlier run.

    The other options are those of `gather_trajectory_groups`; each batch has a progress bar.
    """
    _warn_of_older_option(pbar_total_completion_tokens)
    waiting = iter(groups)
    close_unstarted(islice(waiting, batch_size * skip_batches))
    joined, failures = GatherContext(max_exceptions=max_batch_exceptions), FailureLog()
    running: dict[asyncio.Task[list[TrajectoryGroup]], tuple[Awaitable[TrajectoryGroup], GatherContext]] = {}
    batch: list[TrajectoryGroup] = []
    try:
        while True:
            for group in islice(waiting, batch_size * max_concurrent_batches - len(running)):
                # A failure counts for the batch that its group ends up in. That is not known yet: one context each.
                num_rollouts = joined.budget.num_rollouts = batch_size * num_rollouts_of(group)
                context = GatherContext(
                    max_exceptions=max_batch_exceptions, num_rollouts=num_rollouts, faults=faults,
                    rollout_timeout_s=rollout_timeout_s,
                )  # fmt: skip
                context.budget.failures = failures
                # The context is set while the task starts, not around a yield: there it would leak into the caller.
                with set_gather_context(context):
                    running[asyncio.create_task(finish_group(group, None))] = group, context
            if not running:
                break
            if joined.pbar is None:
                joined.pbar = progress_bar(pbar_desc, batch_size)
            with report_waiting([group for group, _ in running.values()]):
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task in done]:
                batch += task.result()
                joined.add(running.pop(task)[1])
                if len(batch) == batch_size:
                    joined.close_bar()
                    yield batch
                    batch, known = [], joined.budget.num_rollouts
                    joined = GatherContext(max_exceptions=max_batch_exceptions, num_rollouts=known)
        if batch:
            joined.close_bar()
            yield batch
    finally:
        joined.close_bar()
        await cancel_and_wait(running)
        close_unstarted(group for group, _ in running.values())
        if not isinstance(groups, Iterator):  # a generator makes no coroutine that was not asked for
            close_unstarted(waiting)


async def trajectory_group(
    trajectories: Iterable[Awaitable[Trajectory]], *, return_exceptions: bool = False
) -> TrajectoryGroup:
    """Run the rollouts of one scenario at once, and return their group.

    Args:
        return_exceptions: keep the exceptions of failed rollouts in the group, instead of raising the first.
    """
    return TrajectoryGroup(await asyncio.gather(*trajectories, return_exceptions=return_exceptions))


def _warn_of_older_option(pbar_total_completion_tokens: bool) -> None:
    if pbar_total_completion_tokens:
        text = "pbar_total_completion_tokens is deprecated and does nothing; leave it out"
        warnings.warn(text, DeprecationWarning, stacklevel=3)


_yielded: ContextVar[list[Trajectory] | None] = ContextVar("art_yielded_trajectory", default=None)


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
