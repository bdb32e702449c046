"""Yields batches of finished groups while later groups still run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from itertools import islice
from typing import Unpack

from art.client.waiting import progress_bar
from art.compat.gather import OlderOptions, check_older_options
from art.gather.budget import CountBudget, Progress
from art.gather.context import GatherContext, set_gather_context
from art.gather.faults import FaultWatch
from art.gather.gather import finish_group, num_rollouts_of, report_waiting
from art.trajectory import TrajectoryGroup, cancel_and_wait, close_unstarted


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
    **older: Unpack[OlderOptions],
) -> AsyncGenerator[list[TrajectoryGroup], None]:
    """Yield lists of `batch_size` finished groups, in the order in which they finish; the last may be shorter.

    Args:
        groups: awaitables of groups. From a generator only those groups are taken that are started.
        max_batch_exceptions: failed rollouts to tolerate for each batch; below 1 a share of its rollouts.
        max_concurrent_batches: up to `max_concurrent_batches * batch_size` groups run at once.
        skip_batches: number of batches whose inputs are skipped, to continue an earlier run.
        pbar_desc: label of the progress bar of each batch, `None` for no bar.
        faults: decides how many failures are too many, instead of `max_batch_exceptions`.
        rollout_timeout_s: time limit of each rollout; a late rollout is cancelled and counts as failed.
        older: options of older code, see `art.compat.gather`.
    """
    check_older_options(older)
    waiting = iter(groups)
    close_unstarted(islice(waiting, batch_size * skip_batches))
    progress = Progress()
    budget = CountBudget(progress, max_batch_exceptions)
    running: dict[asyncio.Task[list[TrajectoryGroup]], tuple[Awaitable[TrajectoryGroup], GatherContext]] = {}
    batch: list[TrajectoryGroup] = []
    try:
        while True:
            for group in islice(waiting, batch_size * max_concurrent_batches - len(running)):
                # A failure counts for the batch that its group ends up in. That is not known yet: one context each.
                num_rollouts = batch_size * num_rollouts_of(group)
                context = GatherContext(
                    max_exceptions=max_batch_exceptions, num_rollouts=num_rollouts, faults=faults,
                    rollout_timeout_s=rollout_timeout_s,
                )  # fmt: skip
                budget.num_rollouts = num_rollouts
                context.budget.failures = budget.failures
                # The context is set while the task starts, not around a yield: there it would leak into the caller.
                with set_gather_context(context):
                    running[asyncio.create_task(finish_group(group, None))] = group, context
            if not running:
                break
            if progress.pbar is None:
                progress.pbar = progress_bar(pbar_desc, batch_size)
            with report_waiting([group for group, _ in running.values()]):
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task in done]:
                batch += task.result()
                _, context = running.pop(task)
                progress.add(context)
                progress.show(1)
                budget.add(context.budget)
                if len(batch) == batch_size:
                    _end_batch(progress, budget)
                    yield batch
                    batch = []
        if batch:
            _end_batch(progress, budget)
            yield batch
    finally:
        _end_batch(progress, budget)
        await cancel_and_wait(running)
        close_unstarted(group for group, _ in running.values())
        if not isinstance(groups, Iterator):  # a generator makes no coroutine that was not asked for
            close_unstarted(waiting)


def _end_batch(progress: Progress, budget: CountBudget) -> None:
    if progress.pbar is not None:
        progress.pbar.close()
        progress.pbar = None
    progress.reset()
    budget.reset()
