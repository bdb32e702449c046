"""Pictures of trainings with judges: curves side by side, and what noise costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.judging.plan import HAND, PARTS
from benchmarks.judging.results import Arm, JudgedTask
from benchmarks.judging.summary import Cost, costs_of, has_arms
from benchmarks.learnt.picture import COLOURS, INK, save, style_axes

CURVES = "judged-curves.png"
DPI = 96
LINES = (
    ("noise", "#e07b1f", "1 pass"), ("passes", COLOURS[2], "2 passes, shrunk"), ("report", COLOURS[3], "2 passes"),
)  # fmt: skip
BY_SOURCE = {"hand": COLOURS[0], "judge": "#e07b1f", "both": COLOURS[1]}


def draw_curves(tasks: Sequence[JudgedTask]) -> Any:
    """Draw the held-out metric by step of each task, one line for each seed, and their mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(tasks), 3.2), layout="constrained", facecolor="none")
    for judged, axes in zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True):
        for arm in PARTS["compare"]:
            trainings, colour = judged.of(arm), BY_SOURCE[arm.source]
            for one in trainings:
                axes.plot(
                    [p.step for p in one.curve], [p.mean for p in one.curve], color=colour, alpha=0.25, linewidth=0.9
                )
            steps, means = mean_curve(judged, arm)
            axes.plot(steps, means, color=colour, linewidth=2.2, label=arm.name, marker="o", markersize=3)
        axes.set_ylim(0, 1.02)
        axes.set_xticks(range(0, judged.settings.steps + 1, judged.settings.steps // 4))
        style_axes(axes, judged.task, "training step", f"{judged.metric}, held out")
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower right")
    return figure


def mean_curve(judged: JudgedTask, arm: Arm) -> tuple[list[int], list[float]]:
    """Return the evaluated steps and the mean over the seeds. A training that ended early stays where it ended."""
    steps = sorted({point.step for one in judged.of(arm) for point in one.curve})
    means = []
    for step in steps:
        values = [max((p for p in one.curve if p.step <= step), key=lambda p: p.step).mean for one in judged.of(arm)]
        means.append(sum(values) / len(values))
    return steps, means


def noise_picture(judged: JudgedTask) -> str:
    """Return the name of the picture that `draw_noise` makes."""
    return f"judged-noise-{judged.task}.png"


def draw_noise(judged: JudgedTask) -> Any:
    """Draw the held-out gain, and the steps to a level against those with rewards by hand, by reliability."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained", facecolor="none")
    left, right = figure.subplots(1, 2)
    for part, colour, label in LINES:
        costs = [cost for cost in costs_of(judged, PARTS[part]) if cost.arm != HAND]
        _errorbars(left, costs, "against_hand", colour, label)
        _errorbars(right, costs, "more_steps", colour, label)
    for axes, value in ((left, 0.0), (right, 1.0)):
        axes.axhline(value, color=BY_SOURCE["hand"], linewidth=1.4, label="by hand")
    x, steps = "reliability of one pass", judged.settings.steps
    style_axes(left, f"{judged.task}: gain in {steps} steps, less that by hand", x, f"{judged.metric}, held out")
    style_axes(right, "steps to half the gain by hand", x, "times as many as by hand")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _errorbars(axes: Any, costs: Sequence[Cost], value: str, colour: str, label: str) -> None:
    shown = [(cost.measured, estimate) for cost in costs if cost.measured and (estimate := getattr(cost, value))]
    if not shown:
        return
    xs = [measured.mean for measured, _ in shown]
    means = [estimate.mean for _, estimate in shown]
    low = [estimate.mean - estimate.low for _, estimate in shown]
    high = [estimate.high - estimate.mean for _, estimate in shown]
    axes.errorbar(xs, means, [low, high], fmt="o-", color=colour, capsize=2.5, markersize=4, linewidth=1.2, label=label)


def draw_all(results: dict[str, JudgedTask], folder: Path) -> list[Path]:
    """Write every picture for which there are trainings, and return the files."""
    files = []
    compared = [judged for judged in results.values() if has_arms(judged, PARTS["compare"])]
    if compared:
        files.append(folder / CURVES)
        save(draw_curves(compared), files[-1], dpi=DPI)
    for judged in results.values():
        if has_arms(judged, PARTS["noise"]):
            files.append(folder / noise_picture(judged))
            save(draw_noise(judged), files[-1], dpi=DPI)
    return files
