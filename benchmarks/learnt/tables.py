"""Tables and pictures of what was learnt: beside the results, and in the pages that ask for them.

A page asks by two comments, and what is between them is replaced:

    <!-- learnt -->                  a table with a row for each task
    <!-- /learnt -->

    <!-- learnt tic_tac_toe -->      the picture of one task, and a table with a row for each seed
    <!-- /learnt -->
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.learnt.blocks import ROOT, relative
from benchmarks.learnt.picture import draw_task, save
from benchmarks.learnt.results import SeedResult, TaskResults
from benchmarks.report import Cell

PICTURES = ROOT / "docs" / "images" / "tasks"
TASK_PAGES = ROOT / "docs" / "tasks"
SCRIPTED = ("random", "fixed answer", "best script")
"""Columns of the scripted policies."""


def row_of_task(results: TaskResults) -> dict[str, Cell]:
    """One row for all seeds: medians, with the lowest and the highest seed, beside scripted policies."""
    seeds = results.seeds
    learnt = sum(one.is_learnt for one in seeds)
    steps = [len(one.headlines) for one in seeds]
    return {
        "task": results.title,
        "metric": seeds[0].metric,
        **figures(results),
        "intervals apart": f"{learnt} of {len(seeds)} seeds",
        "steps": " to ".join(map(str, sorted({min(steps), max(steps)}))),
        "CPU s": _range([one.cpu_s for one in seeds], ".0f"),
        "wall s": _range([one.wall_s for one in seeds], ".0f"),
        "memory": f"{max(one.peak_memory_bytes for one in seeds) / 1e9:.1f} GB",
    }


def figures(results: TaskResults) -> dict[str, Cell]:
    """The metric of scripted policies (empty if they were not measured), and of the model before and after training."""
    scripted = [results.baselines.get(name) for name in ("random", "constant", "rule")]
    return {
        **dict(zip(SCRIPTED, ("" if one is None else f"{one.mean:.2f}" for one in scripted), strict=True)),
        "before": _range([one.before.mean for one in results.seeds], ".2f"),
        "after": _range([one.after.mean for one in results.seeds], ".2f"),
    }


def row_of_seed(one: SeedResult) -> dict[str, Cell]:
    """One row for one seed, with 95 % intervals."""
    machine = one.environment["machine"]
    return {
        "seed": one.seed,
        "before": one.before.text,
        "after": one.after.text,
        "intervals apart": "yes" if one.is_learnt else "no",
        "CPU s": f"{one.cpu_s:.0f}",
        "wall s": f"{one.wall_s:.0f}",
        "load at the start": str(machine.get("load average at the start", "unknown")),
        "commit": one.environment["commit"],
    }


def markdown_table(rows: Sequence[dict[str, Cell]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def overview(results: Iterable[TaskResults], page: Path) -> str:
    """The table of all tasks, with links to the pages of tasks that have one."""
    rows = [row_of_task(one) for one in results]
    for row in rows:
        target = page_about(str(row["task"]))
        if target is not None and target != page:
            row["task"] = f"[{row['task']}]({relative(target, page)})"
    return markdown_table(rows) if rows else "Nothing was measured yet.\n"


def page_about(task: str, pages: Path = TASK_PAGES) -> Path | None:
    """Return the page about a task: its own, or that of several tasks.

    The heading of a page about several lists them: `# Desks: inventory, calendar and support_desk`.
    """
    for page in [pages / f"{task}.md", *sorted(pages.glob("*.md"))]:
        if page.exists() and (page.stem == task or task in _listed(page)):
            return page
    return None


def _listed(page: Path) -> list[str]:
    heading = page.read_text(encoding="utf-8").partition("\n")[0]
    return re.split(", | and ", heading.partition(": ")[2])


def section(results: TaskResults, page: Path, picture: Path) -> str:
    """The picture and the table of one task."""
    metric, evaluate = results.seeds[0].metric, results.settings.evaluate
    least = "" if results.settings.judge is None else "at least "  # as many of each held-out prompt
    about = f"`{results.command}` for each seed: {metric} of {least}{evaluate} held-out rollouts with 95 % intervals."
    if form := results.seeds[0].form:
        about += f" The tiny model got the form {', '.join(f'`{key}={value}`' for key, value in form.items())}."
    if (judge := results.settings.judge) is not None:
        about += (
            f" The judge `{judge.command(results.task)}` scored the rollouts from before and after training together; "
            "its own time is not counted."
        )
    if results.baselines:
        scripted = zip(SCRIPTED, (results.baselines[name] for name in ("random", "constant", "rule")), strict=True)
        told = "; ".join(f"{name} {one.mean:.2f} ({one.about})" for name, one in scripted)
        about += f"\n\nScripted policies, which see what the model sees: {told}."
    image = f"![{results.title}: the metric by step]({relative(picture, page)})"
    return f"{image}\n\n{about}\n\n{markdown_table([row_of_seed(one) for one in results.seeds])}"


def write_tables(results: Sequence[TaskResults], folder: Path, pictures: Path) -> None:
    """Draw the picture of each task into `pictures`, and write the tables as `README.md` into `folder`."""
    page = folder / "README.md"
    parts = ["# What the tasks teach\n\nMade by `python -m benchmarks tasks`.\n", overview(results, page)]
    for one in results:
        save(draw_task(one), pictures / f"{one.name}.png")
        parts.append(f"## {one.title}\n\n{section(one, page, pictures / f'{one.name}.png')}")
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts))


def block(results: Sequence[TaskResults], page: Path, name: str | None) -> str:
    """Return what a page shows of one task, or of all without a name.

    Raises:
        ValueError: the task has no results.
    """
    by_name = {one.name: one for one in results}
    if name is None:
        return overview(results, page)
    if name not in by_name:
        raise ValueError(f"{page}: no results of {name!r}; there are {', '.join(by_name) or 'none'}")
    return section(by_name[name], page, PICTURES / f"{name}.png")


def _range(values: Sequence[float], form: str) -> str:
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:{form}}" if len(values) == 1 else f"{median:{form}} ({low:{form}} to {high:{form}})"
