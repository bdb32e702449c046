"""Running many rollouts at once.

    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(model, s) for _ in range(8)) for s in scenarios), max_exceptions=4
    )

All rollouts run concurrently. A rollout that raises is counted; one failure more than `max_exceptions` ends everything.
With `faults=`, a `FaultWatch`, the share of failures over the last rollouts decides instead, also those of earlier
gathers, and a group that cannot be scored costs no more than its rollouts.
Whatever ends a gather early (an error, Ctrl-C, cancellation) cancels the other rollouts and waits until they are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from art.client.arguments import (
    check_group_result,
    check_kept,
    check_pending_groups,
    check_rollout_result,
    check_rollouts,
)
from art.errors import ArtError, JudgeError, RolloutError
from art.gather.faults import FATAL, FaultWatch
from art.messages import is_choice
from art.trajectory import (
    PydanticException,
    Trajectory,
    TrajectoryGroup,
    cancel_and_wait,
    close_unstarted,
    finite_number,
    infra_fault,
    rollout_observer,
    within,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]


@dataclass
class GatherContext:
    """What a gather knows so far: progress, running means, failures. One per gather, never shared between two."""

    pbar: Any = None
    metric_sums: Counter[str] = field(default_factory=Counter)
    metric_divisors: Counter[str] = field(default_factory=Counter)
    max_metrics: int | None = None
    """How many metrics the progress bar shows beside the reward."""
    max_exceptions: float = 0
    """Failures to tolerate: a count, or below 1 a share of the rollouts."""
    num_rollouts: int | None = None
    """What a share in `max_exceptions` refers to; by default the total of the progress bar."""
    increment_pbar: bool = True
    pbar_total_completion_tokens: bool = False
    """Deprecated; has no effect."""
    faults: FaultWatch | None = None
    """Decides in place of `max_exceptions`."""
    rollout_timeout_s: float | None = None
    _seen: dict[int, Trajectory] = field(default_factory=dict, repr=False)
    _last_error: Exception | None = None

    def __post_init__(self) -> None:
        _warn_if_used(self.pbar_total_completion_tokens)

    @property
    def num_exceptions(self) -> int:
        return int(self.metric_sums["exceptions"])

    def rollout_finished(self, trajectory: Trajectory) -> None:
        """Count a trajectory, once however often it is reported."""
        if id(trajectory) in self._seen:
            return
        self._seen[id(trajectory)] = trajectory
        if self.faults is not None:
            self.faults.count(trajectory)
        _add_completion_tokens(trajectory)
        for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
            if (number := finite_number(value)) is None:
                continue
            self.metric_sums[name] += number  # type: ignore[assignment]
            self.metric_divisors[name] += 1
        self.update_pbar(int(self.increment_pbar))

    def rollout_failed(self, error: Exception) -> None:
        """Count a failure.

        Raises:
            Exception: `error` itself, if it is one more than `max_exceptions` allows, or one of `FATAL`.
            FaultRateError: it is one more than `faults` allows.
        """
        self.metric_sums["exceptions"] += 1
        self._last_error = error
        self.update_pbar(int(self.increment_pbar))
        if isinstance(error, FATAL) or (self.faults is None and self.too_many_exceptions()):
            raise error
        if self.faults is not None:
            self.faults.failed(error)
        logger.warning("a rollout failed, and its group goes on without it: %s: %s", type(error).__name__, error)

    def group_failed(self, group: TrajectoryGroup, error: Exception) -> None:
        """Count a group that `after_each` failed for.

        Without `faults` only what is known to be no bug, such as a judge that is out of order, can be tolerated.

        Raises:
            Exception: `error` itself, if it must not be tolerated.
            FaultRateError: its rollouts are too many with those that failed before.
        """
        known = isinstance(error, JudgeError) or (isinstance(error, ArtError) and error.transient)
        if isinstance(error, FATAL) or (self.faults is None and not known):
            raise error
        if self.faults is None:
            self.metric_sums["exceptions"] += 1
            if self.too_many_exceptions():
                raise error
        else:
            for _ in group:
                self.faults.lost(error)
        logger.warning("a group is left out, for nothing scored it: %s: %s", type(error).__name__, error)

    def without_unscored(self, group: TrajectoryGroup) -> list[TrajectoryGroup]:
        """The group without rollouts whose reward is no finite number: each has failed, and stands in `exceptions`.

        Raises:
            RolloutError: such a failure, if it is one more than `max_exceptions` allows.
            FaultRateError: it is one more than `faults` allows.
        """
        unscored = [trajectory for trajectory in group if finite_number(trajectory.reward) is None]
        if not unscored:
            return [group]
        errors = [RolloutError(f"a rollout has the reward {t.reward!r}, which is no finite number") for t in unscored]
        for error in errors:
            if self.faults is not None:
                self.faults.lost(error)
                continue
            self.metric_sums["exceptions"] += 1
            self._last_error = error
            if self.too_many_exceptions():
                raise error
        logger.warning("%d rollouts are left out: %s; see what computes it", len(errors), errors[0])
        scored = [trajectory for trajectory in group if finite_number(trajectory.reward) is not None]
        failed = [*group.exceptions, *map(PydanticException.from_exception, errors)]
        return [group.model_copy(update={"trajectories": scored, "exceptions": failed})] if scored else []

    def add(self, part: GatherContext) -> None:
        """Count what `part`, which has ended, counted.

        Raises:
            Exception: the last failure of `part`, if together they are too many.
        """
        self.metric_sums.update(part.metric_sums)
        self.metric_divisors.update(part.metric_divisors)
        self.update_pbar(1)
        if part._last_error is not None and self.faults is None and self.too_many_exceptions():
            raise part._last_error

    def too_many_exceptions(self) -> bool:
        limit = self.max_exceptions
        if 0 < limit < 1:
            limit *= self.num_rollouts or getattr(self.pbar, "total", None) or 0
        return self.num_exceptions > limit

    def update_pbar(self, n: int) -> None:
        if self.pbar is None:
            return
        names = [name for name in self.metric_divisors if name != "reward"][: self.max_metrics]
        shown = ["reward", *names] if "reward" in self.metric_divisors else names
        means = {name: self.metric_sums[name] / self.metric_divisors[name] for name in shown}
        if self.num_exceptions:
            means["exceptions"] = self.num_exceptions
        self.pbar.set_postfix(means, refresh=False)
        self.pbar.update(n)

    def reset(self) -> None:
        """Begin to count anew; the limits stay."""
        self.metric_sums.clear()
        self.metric_divisors.clear()
        self._seen.clear()
        self._last_error = None


def get_gather_context() -> GatherContext:
    """The context of the surrounding gather, or outside of one a new context, which tolerates no failure."""
    current = rollout_observer.get()
    return current if isinstance(current, GatherContext) else GatherContext()


@contextlib.contextmanager
def set_gather_context(context: GatherContext) -> Iterator[None]:
    """Report rollouts that are started inside to `context`."""
    token = rollout_observer.set(context)
    try:
        yield
    finally:
        rollout_observer.reset(token)


async def wrap_group_awaitable(awaitable: Awaitable[T]) -> T | None:
    """Await a group, or anything that iterates over trajectories, on behalf of the surrounding gather.

    Returns:
        The result, or `None` for a failure that the context tolerates.
    """
    if hasattr(awaitable, "_num_trajectories"):
        return await awaitable  # reports each of its rollouts by itself
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
    pbar_total_completion_tokens: bool = False,
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
    faults: FaultWatch | None = None,
    rollout_timeout_s: float | None = None,
) -> list[TrajectoryGroup]:
    """Run all rollouts of all groups and return the groups in input order.

    Args:
        groups: mostly `TrajectoryGroup(coroutines)`, not awaited; any awaitable of a group will do, and so do groups
            that are finished.
        pbar_desc: label of the progress bar, `None` for no bar.
        max_exceptions: failed rollouts to tolerate; below 1 it is a share of all rollouts.
        max_metrics: how many metrics the bar shows.
        after_each: called with each finished group; gives the group to keep, several, or `None` to drop it.
        faults: decides how many failures are too many, in place of `max_exceptions`, and counts them for the log.
        rollout_timeout_s: for each rollout of a `TrajectoryGroup(coroutines)`; a late one is cancelled, and has failed.

    Groups without a single trajectory are left out: their exceptions were counted, and there is nothing to compare.
    """
    _warn_if_used(pbar_total_completion_tokens)
    groups = check_pending_groups(groups)
    context = GatherContext(
        max_exceptions=max_exceptions, max_metrics=max_metrics, faults=faults, rollout_timeout_s=rollout_timeout_s
    )
    total = sum(getattr(group, "_num_trajectories", 1) for group in groups)
    with _progress_bar(context, pbar_desc, total), set_gather_context(context):
        results = await _all_or_nothing(groups, lambda group: finish_group(group, after_each))
    return [group for kept in results for group in kept]


async def finish_group(
    group: Awaitable[TrajectoryGroup] | TrajectoryGroup, after_each: AfterEach | None
) -> list[TrajectoryGroup]:
    """What becomes of one group: itself, nothing, or what `after_each` makes of it."""
    finished = check_group_result(group if isinstance(group, TrajectoryGroup) else await wrap_group_awaitable(group))
    if finished is None or len(finished) == 0:
        logger.warning("a group is left out: none of its rollouts gave a trajectory")
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
    pbar_total_completion_tokens: bool = False,
    max_exceptions: float = 0,
    faults: FaultWatch | None = None,
    rollout_timeout_s: float | None = None,
) -> list[T]:
    """Run rollouts that are not grouped, each giving a trajectory or several; options as above.

    Returns:
        The results in input order. Where a rollout failed and that was tolerated, its exception stands.
    """
    _warn_if_used(pbar_total_completion_tokens)
    rollouts = check_rollouts(trajectories)
    context = GatherContext(max_exceptions=max_exceptions, faults=faults, rollout_timeout_s=rollout_timeout_s)
    with _progress_bar(context, pbar_desc, len(rollouts)), set_gather_context(context):
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
    """`run` of every item, in order; at the first error, or when cancelled, the rest is cancelled and waited for."""
    tasks = [asyncio.create_task(run(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_and_wait(tasks)
        close_unstarted(items)
        raise


@contextlib.contextmanager
def _progress_bar(context: GatherContext, description: str | None, total: int) -> Iterator[None]:
    with progress_bar(description, total) as context.pbar:
        yield


def progress_bar(description: str | None, total: int) -> Any:
    """A tqdm bar to use in a `with`; silent without a description."""
    from tqdm.auto import tqdm

    return tqdm(desc=description, total=total, disable=description is None)


def _add_completion_tokens(trajectory: Trajectory) -> None:
    """Set `metrics["completion_tokens"]`, tokens per answer, where log-probs tell it and the user has not set it."""
    choices = [item for item in trajectory.messages_and_choices if is_choice(item)]
    counts = [len(choice.logprobs.content) for choice in choices if choice.logprobs and choice.logprobs.content]
    if counts:
        trajectory.metrics.setdefault("completion_tokens", sum(counts) / len(counts))


def _warn_if_used(pbar_total_completion_tokens: bool) -> None:
    if pbar_total_completion_tokens:
        warnings.warn(
            "pbar_total_completion_tokens is deprecated and does nothing; leave it out",
            DeprecationWarning,
            stacklevel=3,
        )
