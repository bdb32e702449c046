"""Draws the learning curve of a training as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from art.recipes.training_loop import Evaluation, StepReport
from art.report.charts import WINDOW, running_mean
from art.task import Task

_INK, _GRID = "#2b2b2b", "#d9d9d9"
_BLUE, _ORANGE = "#2f6db3", "#d9772b"


def draw_learning_curve(
    path: Path, task: Task, reports: Sequence[StepReport], before: Evaluation, after: Evaluation
) -> None:
    """Draw a task's headline metric by training step, with a running mean, and two evaluations with 95 % intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patheffects import withStroke

    steps = [report.step for report in reports]
    values = [report.headline for report in reports]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    axes.scatter(steps, values, s=14, color=_BLUE, alpha=0.45, linewidths=0, label="training rollouts of a step")
    axes.plot(steps, running_mean(values), color=_BLUE, linewidth=2, label=f"running mean of {WINDOW} steps")
    last = steps[-1] if steps else 0
    for step, evaluation, text, side in ((0, before, "before", 1), (last, after, "after", -1)):
        low, high = evaluation.interval
        error = [
            [max(0.0, evaluation.mean - low)],
            [max(0.0, high - evaluation.mean)],
        ]  # rounding can make them negative
        label = f"{len(evaluation.trajectories)} held-out rollouts, 95 % interval" if step == 0 else None
        axes.errorbar(
            step, evaluation.mean, error, fmt="o", color=_ORANGE, capsize=4, markersize=7, label=label, zorder=3
        )
        # The curve rises, so there is room below its beginning and above its end.
        axes.annotate(
            f"{text}: {evaluation.mean:.2f}", (step, low if side > 0 else high), xytext=(0, -10 * side),
            textcoords="offset points", ha="left" if side > 0 else "right", va="top" if side > 0 else "bottom",
            color=_ORANGE, fontweight="bold", path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip
    if task.headline_metric != "reward":
        axes.set_ylim(0, 1.05)
    axes.margins(x=0.03)
    axes.set_xlabel("training step", color=_INK)
    axes.set_ylabel(f"{task.headline_metric}, mean over rollouts", color=_INK)
    axes.set_title(task.description, loc="left", color=_INK, fontsize=11)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side_name in ("top", "right"):
        axes.spines[side_name].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
