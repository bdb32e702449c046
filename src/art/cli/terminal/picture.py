"""Draws the learning curve of a training as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from art.recipes.training_loop import Evaluation, StepReport, headline_value
from art.report.pictures import plot_learning
from art.task import Task


def draw_learning_curve(
    path: Path, task: Task, reports: Sequence[StepReport], before: Evaluation, after: Evaluation
) -> None:
    """Draw a task's headline metric by training step, with a running mean, and two evaluations with 95 % intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    points = {report.step: report.headline for report in reports}
    held_out = {
        step: [headline_value(task, trajectory) for trajectory in evaluation.trajectories]
        for step, evaluation in ((0, before), (max(points, default=0), after))
    }
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    plot_learning(axes, points, held_out=held_out, measure=task.headline_metric, title=task.description)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
