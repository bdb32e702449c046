"""Draws a `ModelComparison`: the score of each model with its interval, against its cost or its latency."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from art.report.model_comparison import ModelComparison, ModelRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GRID = "#2b2b2b", "#d9d9d9"
_COLOURS = {"endpoint": "#7a5195", "checkpoint": "#d9772b", "local": "#2f6db3", "scripted": "#5c8a4a"}
_KINDS = {
    "endpoint": "asked over the network", "checkpoint": "trained here", "local": "base model", "scripted": "scripted"
}  # fmt: skip
_MOST_RATIO = 20.0
"""Ratio of the greatest to the smallest cost or latency above which the axis is logarithmic."""


def draw_comparison(path: Path, comparison: ModelComparison) -> None:
    """Draw a comparison as a PNG. Needs matplotlib, which the extra `local` installs.

    The horizontal axis is the cost if every model has a price above 0, else the median time of a rollout. A scripted
    player is a line, since neither its cost nor its time means anything. A model without a score is named below the
    axis.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    scored = [row for row in comparison.models if row.headline is not None]
    rows = [row for row in scored if row.kind != "scripted"]
    has_costs = bool(rows) and all(row.usd_per_1000 for row in rows)
    positions = [_position(row, has_costs=has_costs) for row in rows]
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150)
    axes.plot(positions, [row.headline.mean for row in rows if row.headline], linestyle="none")  # scales the axes
    if positions and min(positions) > 0 and max(positions) / min(positions) > _MOST_RATIO:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    shown: set[str] = set()
    for row, x in zip(rows, positions, strict=True):
        _draw_row(axes, row, x, has_label=row.kind not in shown)
        shown.add(row.kind)
    for row in scored:
        if row.kind == "scripted" and row.headline is not None:
            label = f"{row.label}: {row.headline.mean:.2f}"
            axes.axhline(row.headline.mean, color=_COLOURS[row.kind], linestyle="--", linewidth=1.2, label=label)
    if all(row.headline and 0 <= row.headline.mean <= 1 for row in scored):
        axes.set_ylim(-0.02, 1.08)
    _label(axes, comparison, has_costs=has_costs)
    if scored:
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _label(axes: Axes, comparison: ModelComparison, *, has_costs: bool) -> None:
    what = "USD for 1,000 rollouts" if has_costs else "median seconds of a rollout"
    without = [row.label for row in comparison.models if row.headline is None]
    axes.set_xlabel(what + (f"\nno score: {', '.join(without)}" if without else ""), color=_INK)
    axes.set_ylabel(f"{comparison.headline_metric}, mean over scenarios", color=_INK)
    title = f"{comparison.description}\n{comparison.num_scenarios} held-out scenarios, 95 % intervals"
    axes.set_title(title, loc="left", color=_INK, fontsize=10)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _position(row: ModelRow, *, has_costs: bool) -> float:
    if has_costs and row.usd_per_1000 is not None:
        return row.usd_per_1000
    return 0.0 if row.rollout_latency_s is None else row.rollout_latency_s.median


def _draw_row(axes: Axes, row: ModelRow, x: float, *, has_label: bool) -> None:
    score = row.headline
    assert score is not None
    low = score.mean if score.low is None else score.low
    high = score.mean if score.high is None else score.high
    colour = _COLOURS[row.kind]
    axes.errorbar(
        [x], [score.mean], yerr=[[max(0.0, score.mean - low)], [max(0.0, high - score.mean)]], fmt="o", color=colour,
        capsize=4, markersize=7, label=_KINDS[row.kind] if has_label else None,
    )  # fmt: skip
    across = axes.transAxes.inverted().transform(axes.transData.transform((x, score.mean)))[0]
    is_right = across > 0.5
    axes.annotate(
        f"{row.label}  {score.mean:.2f}", (x, score.mean), xytext=(-8 if is_right else 8, 4),
        textcoords="offset points", fontsize=8, color=colour, ha="right" if is_right else "left",
    )  # fmt: skip
