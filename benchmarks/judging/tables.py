"""Tables of trainings with judges, for the results folder and for blocks of pages:

<!-- judged compare -->     curves and gains of every task, by where rewards came from
<!-- judged noise -->       what reliability costs
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from art.metrics.scores import Estimate
from benchmarks.judging.pictures import CURVES, noise_picture
from benchmarks.judging.plan import HAND, PARTS
from benchmarks.judging.results import JudgedTask
from benchmarks.judging.summary import Cost, costs_of, has_arms
from benchmarks.learnt.blocks import ROOT, relative
from benchmarks.learnt.tables import markdown_table
from benchmarks.report import Cell

PICTURES = ROOT / "docs" / "images"
NOISE_ARMS = list(dict.fromkeys([HAND, *PARTS["noise"], *PARTS["passes"], *PARTS["report"]]))


def row_of(task: str, cost: Cost) -> dict[str, Cell]:
    """One row for all seeds of an arm. Brackets have 95 % intervals over the seeds."""
    return {
        "task": task, "rewards": cost.arm.name, "seeds": cost.seeds, "before": _text(cost.before),
        "after": _text(cost.after), "gain": _text(cost.gain, sign=True),
        "gain against by hand": _text(cost.against_hand, sign=True),
    }  # fmt: skip


def noise_row(cost: Cost) -> dict[str, Cell]:
    reached = "" if cost.reached == cost.seeds else f" ({cost.reached} of {cost.seeds} seeds reached it)"
    return {
        "rewards": cost.arm.name,
        "reliability": _text(cost.measured),
        "pairs in the right order": _text(cost.pairs),
        "reliability when trained": _text(cost.measured_after),
        "after": _text(cost.after),
        "gain against by hand": _text(cost.against_hand, sign=True),
        "steps to half the gain by hand": f"{_text(cost.steps, form='.1f')}{reached}",
        "times as many": _text(cost.more_steps),
    }


def block(results: dict[str, JudgedTask], page: Path, name: str | None, pictures: Path = PICTURES) -> str:
    """Return what a page shows of one part.

    Raises:
        ValueError: there is no such part.
    """
    if name == "compare":
        return _compared(list(results.values()), page, pictures)
    if name == "noise":
        parts = [_noise(judged, page, pictures) for judged in results.values() if has_arms(judged, PARTS["noise"])]
        return "\n".join(parts) or "Nothing was measured yet.\n"
    raise ValueError(f"{page}: no part {name!r} of `judged`; there are compare and noise")


def _compared(tasks: Sequence[JudgedTask], page: Path, pictures: Path) -> str:
    shown = [judged for judged in tasks if has_arms(judged, PARTS["compare"])]
    if not shown:
        return "Nothing was measured yet.\n"
    rows = [row_of(one.task, cost) for one in shown for cost in costs_of(one, PARTS["compare"])]
    image = f"![Held-out metric by step, by where rewards came from]({relative(pictures / CURVES, page)})"
    return f"{image}\n\n{markdown_table(rows)}\n{' '.join(map(_sizes, shown))}\n"


def _noise(judged: JudgedTask, page: Path, pictures: Path) -> str:
    rows = [noise_row(cost) for cost in costs_of(judged, NOISE_ARMS)]
    picture = relative(pictures / noise_picture(judged), page)
    image = f"![{judged.task}: held-out gain and steps by the reliability of the judge]({picture})"
    return f"{image}\n\n{markdown_table(rows)}\n{_sizes(judged)}\n"


def _sizes(judged: JudgedTask) -> str:
    settings = judged.settings
    rate = "" if settings.learning_rate is None else f" at a learning rate of {settings.learning_rate:g}"
    seeds = sorted({one.seed for one in judged.trainings})
    return (
        f"{judged.task}: {settings.steps} steps of {settings.groups} x {settings.rollouts} rollouts{rate}, "
        f"{settings.evaluate} held-out rollouts at each point, seeds {', '.join(map(str, seeds))}."
    )


def _text(value: Estimate | None, *, sign: bool = False, form: str = ".2f") -> str:
    if value is None:
        return ""
    if form == ".2f":
        return value.text(sign=sign)
    interval = "" if value.count == 1 else f" ({value.low:{form}} to {value.high:{form}})"
    return f"{value.mean:{form}}{interval}"
