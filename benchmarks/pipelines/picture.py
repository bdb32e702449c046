"""Pictures of the comparison: speed by staleness, and time lines of rollouts and training.

python -m benchmarks.pipelines.picture docs/images/pipeline.png       time lines of a simulated run
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report import Result, Spread

if TYPE_CHECKING:
    from benchmarks.pipelines.arms import Arm, Span

COLOURS = {"rollout": "#9db8d9", "slow": "#2f5f9e", "train": "#d9822b"}
SLOW_SHARE = 0.02
"""Share of the rollouts, the slowest, that are drawn darker."""


def draw_time_lines(arms: Sequence[Arm], seconds: float | None = None) -> Any:
    """Draw each rollout and each training step of some arms, one arm below the other, on the same axis of time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 1.0 + 1.9 * len(arms)), layout="constrained")
    axes = figure.subplots(len(arms), 1, sharex=True, squeeze=False)[:, 0]
    durations = sorted(span.ended_s - span.began_s for arm in arms for span in arm.rollouts)
    slow_s = durations[int((1 - SLOW_SHARE) * (len(durations) - 1))]
    for arm, ax in zip(arms, axes, strict=True):
        rows = _rows_of(arm.rollouts)
        top = max(rows.values(), default=0) + 1
        for span, row in zip(sorted(arm.rollouts, key=lambda span: span.began_s), rows.values(), strict=True):
            is_slow = span.ended_s - span.began_s >= slow_s
            width = span.ended_s - span.began_s
            ax.barh(row, width, left=span.began_s, height=0.9, color=COLOURS["slow" if is_slow else "rollout"])
        for span in arm.steps:
            width = span.ended_s - span.began_s
            ax.barh(-0.09 * top, width, left=span.began_s, height=0.12 * top, color=COLOURS["train"], edgecolor="white")
        name = "synchronous" if arm.max_staleness == 0 else f"max_staleness={arm.max_staleness}"
        ax.set_title(f"{name}: {len(arm.steps)} steps in {arm.wall_s:.0f} s", loc="left", fontsize=10)
        ax.set_yticks([])
        ax.set_ylim(-0.18 * top, top)
        ax.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel("seconds")
    axes[-1].set_xlim(0, seconds or max(arm.wall_s for arm in arms))
    names = {"rollout": "rollouts", "slow": f"the slowest {SLOW_SHARE:.0%} of them", "train": "training"}
    handles = [Patch(color=COLOURS[key], label=label) for key, label in names.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    return figure


def _rows_of(spans: Sequence[Span]) -> dict[int, int]:
    """Put spans into as few rows as possible without overlap: the row of each, in the order of their beginnings."""
    free_s: list[float] = []
    rows = {}
    for place, span in enumerate(sorted(spans, key=lambda span: span.began_s)):
        row = next((row for row, end_s in enumerate(free_s) if end_s <= span.began_s), len(free_s))
        free_s[row : row + 1] = [span.ended_s]
        rows[place] = row
    return rows


def simulated_arms() -> list[Arm]:
    """Simulate the task with tools that wait: 6 steps, requests of 0.1 s and training of 3 s."""
    from benchmarks.pipelines.arms import Arm, Plan, Span, ideal

    plan = Plan(kind="waiting", seed=0, steps=6, held_out=0)
    measured, arms = Arm(max_staleness=0, request_s=0.1, train_s=[3.0]), []
    for staleness in (0, 2):
        run = ideal(plan, measured, staleness)
        rollouts = [Span(began_s=one.began_s, ended_s=one.ended_s, step=one.policy_version) for one in run.rollouts]
        steps = [Span(began_s=one.began_s, ended_s=one.published_s, step=one.step) for one in run.steps]
        arms.append(Arm(max_staleness=staleness, wall_s=run.wall_s, rollouts=rollouts, steps=steps))
    return arms


def draw_speed(result: Result) -> Any:
    """Draw how many times faster each staleness is, measured and simulated."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(str(row["tools"]) for row in result.rows))
    figure = Figure(figsize=(4.5 * len(kinds), 3.4), layout="constrained")
    for kind, ax in zip(kinds, figure.subplots(1, len(kinds), squeeze=False)[0], strict=True):
        rows = [row for row in result.rows if row["tools"] == kind]
        labels = [str(row["staleness"]) for row in rows]
        for name, label in (("times as fast", "measured"), ("simulated", "simulated")):
            values = [value for row in rows if isinstance(value := row[name], Spread)]
            medians = [value.median for value in values]
            errors = [[value.median - value.low for value in values], [value.high - value.median for value in values]]
            ax.errorbar(labels, medians, errors, marker="o", capsize=3, label=label)
        ax.set(title=f"tools that are {kind}", xlabel="max_staleness", ylabel="times as fast as synchronous")
        ax.set_ylim(bottom=0)
        ax.legend(frameon=False)
    return figure


if __name__ == "__main__":
    draw_time_lines(simulated_arms()).savefig(sys.argv[1], dpi=110)
