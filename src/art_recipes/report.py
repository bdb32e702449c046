"""Reports on training runs: a page for people, and a file for programs. The caller fills in a `Report`.

    write_report(Path("out"), Report(title="...", ...))      # out/report.html and out/report.json

verdict - result - learning curve - held-out scenarios with transcripts - costs - faults - command

Models, tools and servers wrote much of the text, so all of it is escaped, and the page's content security policy allows
neither scripts nor anything from another address.
"""

from __future__ import annotations

import importlib.util
import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from io import BytesIO
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from art.metrics.scores import Estimate
from art.storage.atomic import write_file
from art_recipes.training.pictures import plot_learning, save_picture
from art_recipes.training.progress import RunVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The main result: a measure before and after training."""

    measure: str
    """What was measured on what, e.g. "judged score on 12 held-out scenarios, 4 rollouts each"."""
    before: Estimate
    after: Estimate
    change: Estimate
    """Mean change per scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """One rollout with its score."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in OpenAI's format."""
    score: float
    explanation: str = ""
    """What the judge said about the rollout."""
    note: str = ""
    """A few words about how the rollout ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """One held-out scenario before and after training: its mean scores from 0 to 1, and a rollout of each."""

    scenario: str
    before_score: float
    after_score: float
    before: ScoredRollout
    after: ScoredRollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that the report of a training run shows. Empty parts are left out."""

    title: str
    summary: str
    """One or two sentences: what was trained on what, and who judged."""
    verdict: RunVerdict | None = None
    headline: Headline | None = None
    rewards: Sequence[tuple[int, float]] = ()
    """Pairs of a step and the mean reward of its rollouts, from 0 to 1."""
    comparisons: Sequence[SideBySide] = ()
    costs: str = ""
    """Requests, tokens and money, a line for each source."""
    faults: Sequence[str] = ()
    """What went wrong, one sentence each, such as groups that were left out."""
    command: str = ""
    """Command that repeats the run."""


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_NOTE = (
    "The judge saw the rollouts of a scenario from before and after together, in an order drawn at random, and was not "
    "told which is which: one question, one scale. Its scores of one question say nothing about those of another. "
    "Pairs are means over the rollouts of a scenario."
)
_REWARD_NOTE = (
    "Relative to the other rollouts of the same step, so it can stay level while the policy improves; the result above "
    "is the fair comparison."
)
MAX_MESSAGE_CHARS = 4000
"""Longest message of a transcript; the rest of a longer one is left out."""


def write_report(folder: Path, report: Report) -> Path:
    """Write `report.html` and, for programs, `report.json` into `folder`, and return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    data = TypeAdapter(Report).dump_json(report, indent=2, fallback=str)  # numbers that JSON lacks are null
    for name, content in (("report.json", data + b"\n"), ("report.html", render_report(report).encode())):
        write_file(folder / name, content)
    return folder / "report.html"


def render_report(report: Report) -> str:
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    parts = [
        f"<h1>{escape(report.title)}</h1><p>{escape(report.summary)}</p>",
        _verdict(report.verdict) if report.verdict else "",
        _headline(report.headline) if report.headline else "",
        _part("Learning curve", _curve(report.rewards)),
        _part("Held-out scenarios, one by one", "".join(map(_comparison, report.comparisons))),
        _part("What it cost", _preformatted(report.costs)),
        _part("What went wrong", _list(report.faults)),
        _part("Run it again", _preformatted(report.command)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(report.title)}</title><style>\n{style}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _part(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>\n" if content else ""


def _verdict(verdict: RunVerdict) -> str:
    parts = [
        f'<p class="soft">{title}</p>{_list(lines)}'
        for title, lines in (("Why", verdict.why), ("What to do", verdict.to_do))
        if lines
    ]
    what = f'<p class="verdict {verdict.kind}">{escape(verdict.what)}</p>'
    return f'<div class="card verdict-card">{what}{"".join(parts)}</div>\n'


def _headline(headline: Headline) -> str:
    change = headline.change
    if not math.isfinite(change.low):
        kind, verdict = "soft", "one pair only: nothing can be said about how certain that is"
    elif change.low > 0:
        kind, verdict = "good", "better: the 95 % interval of the change is above 0"
    elif change.high < 0:
        kind, verdict = "bad", "worse: the 95 % interval of the change is below 0"
    else:
        kind, verdict = "soft", "no clear change: the 95 % interval holds 0"
    return (
        f'<div class="card"><p class="soft">{escape(headline.measure)}</p><div class="headline"><div>'
        f'<div class="numbers"><span class="old">{headline.before.mean:.2f}</span><span class="soft">to</span>'
        f"<b>{headline.after.mean:.2f}</b></div>"
        f'<p class="change {kind}">{change.text(sign=True)}</p><p class="soft">{verdict}</p></div>'
        f"<p>before {headline.before.text()}<br>after {headline.after.text()}<br>"
        f'<span class="soft">means with their 95 % intervals</span></p></div><p class="soft">{_NOTE}</p></div>\n'
    )


def _curve(rewards: Sequence[tuple[int, float]]) -> str:
    """The rewards as a picture; nothing without matplotlib, which the extra `local` installs."""
    points = {step: value for step, value in rewards if math.isfinite(value)}
    if not points or importlib.util.find_spec("matplotlib") is None:
        return ""

    def draw(axes: Any) -> None:
        plot_learning(axes, points, held_out={})
        axes.set_ylabel("")
        axes.set_ylim(0, 1)

    file = BytesIO()
    save_picture(file, draw, size=(6, 3))
    return (
        f'<figure class="card"><h3>judged score of training rollouts</h3>'
        f'<img alt="" src="data:image/png;base64,{b64encode(file.getvalue()).decode()}">'
        f"<figcaption>{_REWARD_NOTE}</figcaption></figure>"
    )


def _comparison(comparison: SideBySide) -> str:
    # Leave out what both begin with: the system prompt and the task.
    pairs = zip(comparison.before.messages, comparison.after.messages, strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1] and pair[0].get("role") != "assistant", pairs)))
    sides = _side("before", comparison.before, shared) + _side("after", comparison.after, shared)
    change = comparison.after_score - comparison.before_score
    kind = "soft" if abs(change) < 0.005 else "good" if change > 0 else "bad"
    scores = f"{comparison.before_score:.2f} to {comparison.after_score:.2f}"
    return (
        f'<details><summary>{escape(comparison.scenario)} <span class="soft">{scores}</span> '
        f'<span class="{kind}">{change:+.2f}</span></summary><div class="sides">{sides}</div></details>'
    )


def _side(name: str, rollout: ScoredRollout, skip: int) -> str:
    turns = "".join(map(_turn, rollout.messages[skip:]))
    note = f" · {escape(rollout.note)}" if rollout.note else ""
    judge = f"<blockquote>{escape(rollout.explanation)}</blockquote>" if rollout.explanation else ""
    head = f'<h3>{name}: {rollout.score:.2f}<span class="soft">{note}</span></h3>'
    return f'<div class="side {name}">{head}{turns}{judge}</div>'


def _turn(message: Mapping[str, Any]) -> str:
    role = str(message.get("role", ""))
    content = message.get("content")
    said = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content else []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        said.append(f"{function.get('name')} {function.get('arguments')}")
    text = "\n".join(said).strip() or "(nothing)"
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[:MAX_MESSAGE_CHARS]}\n[{len(text) - MAX_MESSAGE_CHARS} more characters]"
    name = role if role in ("system", "user", "assistant", "tool") else "other"
    return f'<div class="turn {name}"><span>{escape(role)}</span><div class="say">{escape(text)}</div></div>'


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if text else ""
