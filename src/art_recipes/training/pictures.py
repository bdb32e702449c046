"""Pictures by matplotlib, which the extra `local` installs: learning curves and distributions of scores.

    figure, axes = plt.subplots()
    plot_learning(axes, rewards, held_out={0: before, 30: after})

Each function draws into axes of the caller. `save_picture` makes a PNG of them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from art.metrics.scores import mean_with_interval

_INK, _GRID = "#2b2b2b", "#d9d9d9"
_BLUE, _ORANGE = "#2f6db3", "#d9772b"
WINDOW = 5
"""Number of steps in a running mean."""


def save_picture(file: Path | IO[bytes], draw: Callable[[Any], None], *, size: tuple[float, float] = (8, 4.5)) -> None:
    """Write a PNG of what `draw` puts into matplotlib's axes.

    Args:
        size: width and height in inches of 150 points.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    draw(figure.subplots())
    figure.savefig(file, format="png")


def plot_learning(
    axes: Any,
    training: Sequence[float] | Mapping[int, float],
    *,
    held_out: Mapping[int, Sequence[float]],
    measure: str = "reward",
    title: str = "",
) -> None:
    """Draw a measure by training step, its running mean, and held-out evaluations with 95 % intervals.

    The axis goes from 0 to 1 if every held-out value is in that range.

    Args:
        axes: matplotlib's axes.
        training: mean over the rollouts of each step, in order or by the step's number.
        held_out: values of held-out rollouts or scenarios, by the step of the checkpoint that was evaluated.
        measure: name of the measure.

    Raises:
        ValueError: an evaluation has no values.
    """
    points = dict(training) if isinstance(training, Mapping) else dict(enumerate(training, start=1))
    if points:
        axes.scatter(
            list(points), list(points.values()), s=14, color=_BLUE, alpha=0.45, linewidths=0,
            label="training rollouts of a step",
        )  # fmt: skip
        means = _running_mean(points)
        axes.plot(list(means), list(means.values()), color=_BLUE, linewidth=2, label=f"running mean of {WINDOW} steps")
    for index, (step, values) in enumerate(sorted(held_out.items())):
        mean, error = _mean_with_error(values, f"step {step}")
        label = f"held out ({len(values)}), 95 % interval" if index == 0 else None
        _draw_held_out(axes, step, mean, error, label, is_first=index == 0)
    _finish_learning(axes, list(points.values()), held_out, measure, title)


def plot_seeds(
    axes: Any,
    training: Sequence[Mapping[int, float]],
    *,
    held_out: Mapping[int, Sequence[float]],
    measure: str = "reward",
    title: str = "",
) -> None:
    """Draw the runs of several seeds: the mean of their running means, in a band from the lowest to the highest.

    Args:
        axes: matplotlib's axes.
        training: for each seed, the mean over the rollouts of each step.
        held_out: the held-out means of the seeds, by the step of the checkpoint that was evaluated. Their bars go from
            the lowest to the highest.
        measure: name of the measure.

    Raises:
        ValueError: an evaluation has no values.
    """
    curves = [_running_mean(curve) for curve in training]
    steps = sorted({step for curve in curves for step in curve})
    at = {step: [curve[step] for curve in curves if step in curve] for step in steps}
    if steps:
        axes.fill_between(
            steps, [min(at[step]) for step in steps], [max(at[step]) for step in steps], color=_BLUE, alpha=0.18,
            linewidth=0, label="lowest to highest seed",
        )  # fmt: skip
        means = [statistics.fmean(at[step]) for step in steps]
        axes.plot(steps, means, color=_BLUE, linewidth=2, label=f"mean of {len(curves)} seeds, over {WINDOW} steps")
    for index, (step, values) in enumerate(sorted(held_out.items())):
        mean, _ = _mean_with_error(values, f"step {step}")
        error = [[mean - min(values)], [max(values) - mean]]
        axes.scatter([step] * len(values), values, s=14, color=_ORANGE, alpha=0.5, linewidths=0)
        label = "held out, lowest to highest seed" if index == 0 else None
        _draw_held_out(axes, step, mean, error, label, is_first=index == 0)
    _finish_learning(axes, [value for values in at.values() for value in values], held_out, measure, title)


def _running_mean(points: Mapping[int, float]) -> dict[int, float]:
    values = list(points.values())
    return {step: statistics.fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i, step in enumerate(points)}


def _draw_held_out(
    axes: Any, step: int, mean: float, error: list[list[float]], label: str | None, *, is_first: bool
) -> None:
    """Draw a point with its bar and its number."""
    (below,), (above,) = error
    axes.errorbar(step, mean, error, fmt="o", color=_ORANGE, capsize=4, markersize=7, label=label, zorder=3)
    # A curve that rises has room below its beginning and above its other points.
    place, offset, ha, va = (mean - below, -10, "left", "top") if is_first else (mean + above, 10, "right", "bottom")
    axes.annotate(
        f"{mean:.2f}", (step, place), xytext=(0, offset), textcoords="offset points", ha=ha, va=va, color=_ORANGE,
        fontweight="bold", path_effects=_outline(),
    )  # fmt: skip


def _finish_learning(
    axes: Any, trained: Sequence[float], held_out: Mapping[int, Sequence[float]], measure: str, title: str
) -> None:
    if held_out and all(0 <= value <= 1 for values in held_out.values() for value in values):
        axes.set_ylim(-0.02 if min(trained, default=0) >= 0 else None, 1.05)
    axes.margins(x=0.03)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("training step", color=_INK)
    axes.set_ylabel(f"{measure}, mean over rollouts", color=_INK)
    axes.legend(frameon=False, loc="best", fontsize=9)
    _finish(axes, title, "y")


def plot_scores(
    axes: Any, scores: Mapping[str, Sequence[float]], *, measure: str = "judge's score", title: str = ""
) -> None:
    """Draw a row of points for each name, from the top, with the mean and its 95 % interval.

    Example: plot_scores(axes, {"before": [0.2, 0.4], "after": [0.9, 0.7]})

    Raises:
        ValueError: there are no scores, or a name has none.
    """
    if not scores:
        raise ValueError("there are no scores to draw; expected at least one name with its scores")
    jitter = random.Random(0)
    for row, (name, values) in enumerate(scores.items()):
        mean, error = _mean_with_error(values, name)
        axes.scatter(
            values, [row + jitter.uniform(-0.22, 0.22) for _ in values], s=16, color=_BLUE, alpha=0.4, linewidths=0
        )
        axes.errorbar(mean, row, xerr=error, fmt="o", color=_ORANGE, capsize=4, markersize=8, zorder=3)
        axes.annotate(
            f"{mean:.2f}", (mean, row), xytext=(0, 12), textcoords="offset points", ha="center", color=_ORANGE,
            fontweight="bold", path_effects=_outline(),
        )  # fmt: skip
    axes.set_yticks(range(len(scores)), list(scores))
    axes.set_ylim(len(scores) - 0.5, -0.5)
    axes.set_xlabel(measure, color=_INK)
    _finish(axes, title, "x")


def _mean_with_error(values: Sequence[float], name: str) -> tuple[float, list[list[float]]]:
    """Return a mean with the lengths of its error bars, in the form `[[below], [above]]` of matplotlib."""
    if not values:
        raise ValueError(f"{name!r} has no values to draw; expected one or more")
    mean, (low, high) = mean_with_interval(values)
    if len(values) == 1:
        low = high = mean
    return mean, [[max(0.0, mean - low)], [max(0.0, high - mean)]]  # rounding can make them negative


def _outline() -> list[Any]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3, foreground="white")]


def _finish(axes: Any, title: str, grid: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.grid(axis=grid, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
