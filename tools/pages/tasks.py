"""docs/tasks.md: a card for each ready task, with its picture, what is learnt, and the figures that were measured."""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path

from art.task import Task, get_task, list_tasks
from benchmarks.learnt.results import Judge, Settings, TaskResults, read_all
from benchmarks.learnt.tables import figures as table_of
from benchmarks.learnt.tables import markdown_table, page_about
from tools.notebooks.times import titles
from tools.pages.markdown import escaped, header

DOCS = Path(__file__).parents[2] / "docs"
TASK_NOTEBOOKS = {"mail_search": "art_e", "yes_no_maybe": "quick_start"}
"""Notebooks of tasks with another name."""
LIMITS = {
    "calendar": "Measured before its reward became stricter and its warm start longer (November 2026).",
    "inventory": "One of five seeds rose slowly and ended at 0.47, below the 0.65 that was aimed at.",
    "temporal_clue": "The tiny model looks two things up and deduces nothing; one of five seeds stayed at 0.685.",
    "tic_tac_toe": "A fixed order of cells wins as often, so this does not show that the model reads lines.",
    "yes_no_maybe": "Nothing has to be read: it is a quick test of a machine.",
}
"""What the figures of a task do not show."""
NOT_MEASURED = "Not measured yet."
_INTRODUCTION = """
Each of these agents learns on a laptop, without a GPU and without downloads: `art train NAME` makes a tiny model,
trains it by reinforcement learning and tests it on held-out scenarios. On a machine with a GPU, the same command with
`--base-model` trains a real model. `art tasks NAME` shows the options of a task, which are set by `-o KEY=VALUE`.

Figures are those of the headline metric on held-out rollouts, before and after `art train NAME --held-out 400`: the
median over all seeds, and in brackets the lowest and the highest. A seed counts as learnt if its two 95 % intervals do
not overlap. Beside them is what scripted policies reach that see what the model sees: any legal answer, the best fixed
answer that we know, and the best script. CPU time is that of everything, the making of the tiny model included.
[Benchmarks](../benchmarks/README.md#what-the-ready-tasks-teach) says how it is measured, and
[the tables](../benchmarks/results/2026-11-29-cpu/tasks/README.md) have every seed.
"""
_MORE = """
## Recipes and agents of other libraries

These notebooks train agents that are no ready task.

"""
FURTHER = {
    "rewards_or_judges.md": "The same tasks with rewards by hand, with RULER by a judge that errs, and with both.",
    "compare.md": "Trained agents beside prompted models, on the same held-out scenarios: score, turns, time and cost.",
}
"""Pages with further results, and what they are about. A page of the site is shown with its first picture."""
_OWN = """
## Your own

A task is a class with scenarios, a rollout and a reward. `art new my_agent` writes one that learns as it is, with
tests, and [Your own agent](your_own_agent.md) goes through its parts. [The notebooks](../examples/notebooks/README.md)
write the loop by hand, for code that should not become a task. Agents that you have already are connected as they are:
[LangGraph and others](integrations.md), [other languages](rollouts.md).
"""


def render_page() -> str:
    results = {one.task: one for one in read_all() if one.seeds and not one.settings.options}
    cards = [_card(name, task, results.get(name)) for name, task in ready_tasks()]
    known = {_notebook_of(name) for name, _ in ready_tasks()}
    more = [_notebook_card(name, title) for name, title in titles().items() if name not in known]
    return (
        header("Tasks", _INTRODUCTION) + "## Ready tasks\n\n" + _grid(cards) + _MORE + _grid(more) + _further() + _OWN
    )


def ready_tasks() -> Iterator[tuple[str, Task]]:
    """The tasks that come with ART, without those that a program has registered."""
    for name in list_tasks():
        task = get_task(name)
        if type(task).__module__.startswith(("art.tasks.", "art_tasks.")):
            yield name, task


def _task_text(task: Task) -> str:
    return f"{escaped(task.description[:1].upper() + task.description[1:])}."


def figures(results: TaskResults | None) -> str:
    """What was measured: what holds in every seed, and a table beside scripted policies."""
    if results is None:
        return NOT_MEASURED
    seeds = results.seeds
    worst = min(seeds, key=lambda seed: seed.after.mean)
    unlearnt = [str(seed.seed) for seed in seeds if not seed.is_learnt]
    named = ", ".join(str(seed.seed) for seed in seeds)
    floor = math.floor(100 * worst.after.mean + 1e-9) / 100  # 0.685 is no claim of 0.69
    claim = f"**{worst.metric}: {floor:.2f} or more after training in each of {len(seeds)} seeds** ({named})"
    learnt = f"not shown to be learnt in seed {', '.join(unlearnt)}" if unlearnt else "learnt in each"
    cpu_s = statistics.median(seed.cpu_s for seed in seeds)
    lines = [f"{claim}; {learnt}. {cpu_s / 60:.1f} minutes of CPU time.", markdown_table([table_of(results)]).rstrip()]
    if rule := results.baselines.get("rule"):
        lines.append(f"Fixed answer: {results.baselines['constant'].about}. Best script: {rule.about}.")
    return "\n\n".join(lines)


def _card(name: str, task: Task, results: TaskResults | None) -> str:
    links = [f"[about it]({page.relative_to(DOCS)})"] if (page := page_about(name, DOCS / "tasks")) else []
    links += [f"[notebook](../examples/notebooks/{notebook}.ipynb)"] if (notebook := _notebook_of(name)) else []
    measured = figures(results)
    if results is not None and task.tiny_options:
        measured += " The figures are of the smaller form that a tiny model learns."
    if results is not None and name in LIMITS:
        measured += f" {LIMITS[name]}"
    if results is not None and task.needs_judge:
        measured += " A scripted judge gave the rewards."
    lines = [_task_text(task), measured, _command(name, task) + "".join(f" · {link}" for link in links)]
    return _boxed(name, _picture(f"images/tasks/{name}.png", f"{name}: the metric by training step"), lines)


def _command(name: str, task: Task) -> str:
    """What trains a tiny model; with a scripted judge for a task that has no reward of its own."""
    if not task.needs_judge:
        return f"`art train {name}`"
    words = Settings(evaluate=0, judge=Judge()).judge_arguments()
    return f"`{Judge().command(name)}` in one terminal, `art train {name} {shlex.join(words)}` in another"


def _notebook_card(name: str, title: str) -> str:
    picture = _picture(f"images/notebooks/{name}.png", f"{title}: the learning curve of the notebook")
    return _boxed(escaped(title), picture, [f"Notebook [`{name}`](../examples/notebooks/{name}.ipynb)"])


def _further() -> str:
    """The pages with further results that there are."""
    cards = []
    for name, about in FURTHER.items():
        if (DOCS / name).exists():
            text = (DOCS / name).read_text(encoding="utf-8")
            picture = re.search(r"^!\[.*\]\(.*\)$", text, re.MULTILINE)
            title = text.partition("\n")[0].removeprefix("# ")
            cards.append(_boxed(title, picture[0] if picture else "", [f"{about} [Results]({name})"]))
    return f"\n## Further results\n\n{_grid(cards)}" if cards else ""


def _picture(path: str, text: str) -> str:
    return f"![{escaped(text)}]({path})" if (DOCS / path).exists() else ""


def _boxed(heading: str, picture: str, lines: list[str]) -> str:
    return (
        '<div class="card" markdown>\n\n'
        + "\n\n".join([f"### {heading}", *filter(None, [picture]), *lines])
        + "\n\n</div>"
    )


def _grid(cards: list[str]) -> str:
    """Cards in columns, as the theme of the site draws them. Elsewhere they stand below each other."""
    return '<div class="grid" markdown>\n\n' + "\n\n".join(cards) + "\n\n</div>\n"


def _notebook_of(name: str) -> str | None:
    notebook = TASK_NOTEBOOKS.get(name, name)
    return notebook if notebook in titles() else None
