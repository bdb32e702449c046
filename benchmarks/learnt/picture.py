"""The picture of a task: its metric by training step, and on held-out rollouts before and after."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.learnt.results import TaskResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#7b828c"
"""Text and lines: grey that can be read on white and on black, as the background is transparent."""
COLOURS = ("#3f86d6", "#2fa37c", "#b06fd0", "#c99a1e", "#d0607a")
HELD_OUT = "#e07b1f"
RUNNING = 5
"""Steps whose mean is one point of a line."""


def draw_task(results: TaskResults) -> Any:
    """Draw the runs of one task as a matplotlib figure of 6 x 3 inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained", facecolor="none")
    axes = figure.subplots()
    for one, colour in zip(results.seeds, _repeated(COLOURS, len(results.seeds)), strict=True):
        means = running_means(one.headlines)
        axes.plot(range(1, len(means) + 1), means, color=colour, linewidth=1.6, label=f"seed {one.seed}")
    last = max(len(one.headlines) for one in results.seeds)
    for place, one in enumerate(results.seeds):
        shift = (place - (len(results.seeds) - 1) / 2) * last / 60
        for step, held_out in ((-last / 25 + shift, one.before), (last * 1.05 + shift, one.after)):
            bars = [[held_out.mean - held_out.low], [held_out.high - held_out.mean]]
            label = "held out, 95 %" if place == 0 and held_out is one.before else None
            axes.errorbar(step, held_out.mean, bars, fmt="o", color=HELD_OUT, capsize=2.5, markersize=4, label=label)
    low, high = axes.get_ylim()
    if low >= 0 and high <= 1.05:
        axes.set_ylim(0, 1.02)
    style_axes(axes, results.title, "training step", f"{results.seeds[0].metric}, mean of {RUNNING} steps")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=2, loc="best")
    return figure


def save(figure: Any, path: Path, *, dpi: int = 120) -> None:
    """Write a figure with a transparent background, the same bytes for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, transparent=True, metadata={"Software": None})


def running_means(values: Sequence[float]) -> list[float]:
    """Means of each value and the up to 4 before it.

    Example: running_means([0, 1, 2]) is [0, 0.5, 1].
    """
    return [statistics.fmean(values[max(0, end - RUNNING) : end]) for end in range(1, len(values) + 1)]


def _repeated(colours: Sequence[str], count: int) -> list[str]:
    return [colours[place % len(colours)] for place in range(count)]


def style_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Give axes a title, names, and colours that can be read on any background."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.7)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(INK)
