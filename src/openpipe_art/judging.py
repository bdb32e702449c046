"""RULER over a plain list of trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from art.model import Model
from art.rewards import ruler_score_group as score_group
from art.trajectory import Trajectory, TrajectoryGroup
from openpipe_art.blocking import run_blocking


async def aruler_score_group(
    trajectories: Iterable[Trajectory], model: str | Model[Any, Any], **further: Any
) -> list[Trajectory]:
    """Copies of the trajectories, in their order, with the judge's scores as rewards.

    Args:
        model: the judge, as litellm writes it (`openai/o3`), or a model with an address of its own.
        further: other arguments of `art.rewards.ruler_score_group`.

    Raises:
        JudgeError: there are no usable scores.
    """
    scored = await score_group(TrajectoryGroup(list(trajectories)), model, **{**further, "swallow_exceptions": False})
    assert scored is not None
    return list(scored)


def ruler_score_group(
    trajectories: Iterable[Trajectory], model: str | Model[Any, Any], **further: Any
) -> list[Trajectory]:
    """`aruler_score_group` for code without an event loop."""
    return run_blocking(aruler_score_group(trajectories, model, **further))
