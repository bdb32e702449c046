"""RULER for a plain list of trajectories, with and without `await`."""

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
"""Judgements that still run."""


class Scored(Sequence[Trajectory]):
    """Trajectories that a judge scores in a thread. `await` gives them as a list; any other use waits for scores."""

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
    trajectories: Iterable[Trajectory], model: str | Model[Any, Any], **settings: Any
) -> list[Trajectory]:
    """Have a judge model compare trajectories, set its scores as their rewards, and return them in the same order.

    Args:
        trajectories: rollouts of one scenario.
        model: the judge, by its litellm name (`openai/o3`), or a model with an address of its own.
        settings: other arguments of `art.rewards.ruler_score_group`.

    Raises:
        JudgeError: there are no usable scores; all rewards stay as they were.
    """
    own = list(trajectories)
    scored = await score_group(TrajectoryGroup(own), model, **{**settings, "swallow_exceptions": False})
    assert scored is not None
    for trajectory, judged in zip(own, scored, strict=True):
        trajectory.reward, trajectory.metrics, trajectory.logs = judged.reward, judged.metrics, judged.logs
    return own


def ruler_score_group(trajectories: Iterable[Trajectory], model: str | Model[Any, Any], **settings: Any) -> Scored:
    """Have a judge model set the rewards of trajectories; arguments and errors are those of `aruler_score_group`.

    This is for code without `await`. In a notebook it returns at once, and the result may be awaited.
    """
    future = start_blocking(aruler_score_group(trajectories, model, **settings))
    if future.done():
        future.result()
    else:
        _pending.add(future)
        future.add_done_callback(_report)
    return Scored(future)


def wait_for_scores() -> None:
    """Wait for all judgements that `ruler_score_group` has started."""
    wait(list(_pending))


def _report(future: Future[list[Trajectory]]) -> None:
    _pending.discard(future)
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("trajectories keep their rewards, because scoring them failed: %s", error)
