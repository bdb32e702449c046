"""RULER over a plain list of trajectories, with and without `await`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, overload

from art.model import Model
from art.rewards import ruler_score_group as score_group
from art.trajectory import Trajectory, TrajectoryGroup
from openpipe_art.blocking import start_blocking

logger = logging.getLogger(__name__)

_pending: set[Future[list[Trajectory]]] = set()
"""Judgements that nobody has waited for yet."""


class Scored(Sequence[Trajectory]):
    """Trajectories with their scores. While those are still under way, `await` gives the list; any other use waits."""

    def __init__(self, future: Future[list[Trajectory]]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, list[Trajectory]]:
        return asyncio.wrap_future(self._future).__await__()

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        return self._future.result()[index]

    def __len__(self) -> int:
        return len(self._future.result())

    def __eq__(self, other: object) -> bool:
        return self._future.result() == (list(other) if isinstance(other, Scored) else other)

    __hash__ = object.__hash__  # for `asyncio.gather`

    def __repr__(self) -> str:
        return repr(self._future.result())


async def aruler_score_group(
    trajectories: Iterable[Trajectory], model: str | Model[Any, Any], **further: Any
) -> list[Trajectory]:
    """The trajectories, in their order, with the judge's scores as rewards.

    Args:
        model: the judge, as litellm writes it (`openai/o3`), or a model with an address of its own.
        further: other arguments of `art.rewards.ruler_score_group`.

    Raises:
        JudgeError: there are no usable scores. Then no reward has changed.
    """
    given = list(trajectories)
    scored = await score_group(TrajectoryGroup(given), model, **{**further, "swallow_exceptions": False})
    assert scored is not None
    for trajectory, judged in zip(given, scored, strict=True):
        trajectory.reward, trajectory.metrics, trajectory.logs = judged.reward, judged.metrics, judged.logs
    return given


def ruler_score_group(trajectories: Iterable[Trajectory], model: str | Model[Any, Any], **further: Any) -> Scored:
    """`aruler_score_group` for code without an event loop; inside of one it may be awaited, and need not be."""
    future = start_blocking(aruler_score_group(trajectories, model, **further))
    if future.done():
        future.result()
    else:
        _pending.add(future)
        future.add_done_callback(_report)
    return Scored(future)


def wait_for_scores() -> None:
    """Return when no judgement that was begun is still under way."""
    wait(list(_pending))


def _report(future: Future[list[Trajectory]]) -> None:
    _pending.discard(future)
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("trajectories keep their rewards, because scoring them failed: %s", error)
