"""The parts of a report as data, and the report as one HTML page, with the result first.

verdict - result - learning curves - held-out scenarios - transcripts - costs - faults - settings - what was used

Models, tools and servers wrote much of the text, so all of it is escaped, and the page's content security policy allows
neither scripts nor anything from another address.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from art.report.scores import Estimate
from art.storage.atomic import write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The main result: a measure before and after training."""

    measure: str
    """What was measured on what, e.g. "judged score on 12 held-out scenarios, 4 rollouts each"."""
    before: Estimate
    after: Estimate
    change: Estimate
    """Mean change per scenario."""
    note: str = ""
    """How to read the result."""


VerdictKind = Literal["good", "soft", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the run achieved, in a sentence, with reasons and remedies."""

    kind: VerdictKind
    what: str
    why: Sequence[str] = ()
    to_do: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A measure by training step."""

    title: str
    points: Sequence[tuple[int, float]]
    """Pairs (step, value) in the order of the steps."""
    note: str = ""
    bounds: tuple[float, float] | None = None
    """Ends of the value axis; by default the range of the values, rounded outwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """Mean scores of one held-out scenario before and after training, from 0 to 1."""

    scenario: str
    before: float
    after: float
    label: str = ""
    """A few words about the scenario, such as its difficulty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One rollout with its score."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in OpenAI's format."""
    score: float
    explanation: str = ""
    """What the judge said about the rollout."""
    note: str = ""
    """A few words about how the rollout ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rollouts of one scenario before and after training, side by side."""

    scenario: str
    before: Transcript
    after: Transcript


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of texts."""

    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    """Headings; empty for a table of names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Something that the run used or made, such as tools, scenarios or a prompt."""

    title: str
    text: str = ""
    """Text that keeps its line breaks."""
    table: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that the report of a training run shows. Empty parts are left out."""

    title: str
    summary: str
    """One or two sentences: what was trained on what, and who judged."""
    verdict: Verdict | None = None
    headline: Headline | None = None
    curves: Sequence[Curve] = ()
    scenarios: Sequence[ScenarioResult] = ()
    comparisons: Sequence[Comparison] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time in seconds, by activity."""
    costs: Table | None = None
    """Requests, tokens and money by source."""
    faults: Sequence[str] = ()
    """What went wrong, one sentence each, such as groups that were left out."""
    command: str = ""
    """Command that repeats the run."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that the run can be repeated with."""
    sections: Sequence[Section] = ()


_WIDTH, _HEIGHT = 440, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 12, 34
WINDOW = 5
"""Number of steps in a running mean."""


def draw_curve(curve: Curve) -> str:
    """Draw a measure by training step as SVG: its points and their running mean. Without points the text is empty."""
    points = [(step, value) for step, value in curve.points if math.isfinite(value)]
    if not points:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = curve.bounds or _rounded(min(values), max(values))
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(first, last, whole=True):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 2}" text-anchor="end">training step</text>')
    parts += [f'<circle class="point" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3"/>' for s, v in points]
    line = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in zip(steps, running_mean(values), strict=True))
    parts.append(f'<polyline class="line" points="{line}"/>')
    return _svg(_WIDTH, _HEIGHT, curve.title, parts)


def draw_intervals(before: Estimate, after: Estimate) -> str:
    """Draw two means on an axis from 0 to 1, each with its interval."""
    width, height, left, right = 440, 96, 60, 16

    def x(value: float) -> float:
        return left + min(max(value, 0.0), 1.0) * (width - left - right)

    parts = []
    for tick in ticks(0.0, 1.0):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="8" y2="70"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="88" text-anchor="middle">{tick:g}</text>')
    for name, value, y in (("before", before, 24), ("after", after, 54)):
        parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{name}</text>')
        if math.isfinite(value.low):
            ends = f'x1="{x(value.low):.1f}" x2="{x(value.high):.1f}"'
            parts.append(f'<line class="interval {name}" {ends} y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="{name}" cx="{x(value.mean):.1f}" cy="{y}" r="7"/>')
    return _svg(width, height, f"before {before.text()}, after {after.text()}", parts)


def draw_pair(before: float, after: float) -> str:
    """Draw the change of one scenario's score on a track from 0 to 1."""
    width, height, margin = 160, 18, 8

    def x(value: float) -> float:
        return margin + min(max(value, 0.0), 1.0) * (width - 2 * margin)

    middle, kind = height / 2, "after" if after >= before else "worse"
    start, end = f"{x(before):.1f}", f"{x(after):.1f}"
    parts = [
        f'<line class="grid" x1="{margin}" x2="{width - margin}" y1="{middle}" y2="{middle}"/>',
        f'<line class="interval {kind}" x1="{start}" x2="{end}" y1="{middle}" y2="{middle}"/>',
        f'<circle class="before" cx="{start}" cy="{middle}" r="5"/>',
        f'<circle class="{kind}" cx="{end}" cy="{middle}" r="5"/>',
    ]
    return _svg(width, height, f"from {before:.2f} to {after:.2f}", parts)


def running_mean(values: Sequence[float]) -> list[float]:
    """Return for each value the mean of the last `WINDOW` values up to it, or of fewer at the start."""
    windows = [values[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Choose up to six round numbers from `low` to `high`: ticks(0, 1) is [0, 0.2, 0.4, 0.6, 0.8, 1]."""
    step = _tick_step(low, high)
    if whole:
        step = max(1, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick_step(low: float, high: float) -> float:
    span = (high - low) / 5
    power: float = 10 ** math.floor(math.log10(span))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= span * (1 - 1e-9))


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis for values from `low` to `high`: the closest ticks outside them."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    step = _tick_step(low, high)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MAX_MESSAGE_CHARS = 4000
"""Longest message of a transcript; the rest of a longer one is left out."""
_NUM_SHADES = 7


def write_report(folder: Path, report: Report) -> Path:
    """Write `report.html` and, for programs, `report.json` into `folder`, and return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(_finite(asdict(report)), indent=2, ensure_ascii=False, default=str)
    for name, text in (("report.json", data + "\n"), ("report.html", render_report(report))):
        write_file(folder / name, text.encode())
    return folder / "report.html"


def render_report(report: Report) -> str:
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    parts = [
        f"<h1>{escape(report.title)}</h1><p>{escape(report.summary)}</p>",
        _verdict(report.verdict) if report.verdict else "",
        _headline(report.headline) if report.headline else "",
        _part("Learning curve", _curves(report)),
        _part("Held-out scenarios, one by one", _results(report.scenarios)),
        _part("Before and after, side by side", "".join(_comparison(c, i) for i, c in enumerate(report.comparisons))),
        _part("What it cost", _seconds(report.seconds) + (_table(report.costs) if report.costs else "")),
        _part("What went wrong", _list(report.faults)),
        _part("Run it again", _again(report)),
        _part("What was used", "".join(map(_section, report.sections))),
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


def _verdict(verdict: Verdict) -> str:
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
    note = f'<p class="soft">{escape(headline.note)}</p>' if headline.note else ""
    return (
        f'<div class="card"><p class="soft">{escape(headline.measure)}</p><div class="headline"><div>'
        f'<div class="numbers"><span class="old">{headline.before.mean:.2f}</span><span class="soft">to</span>'
        f"<b>{headline.after.mean:.2f}</b></div>"
        f'<p class="change {kind}">{change.text(sign=True)}</p><p class="soft">{verdict}</p></div>'
        f"<figure>{draw_intervals(headline.before, headline.after)}"
        "<figcaption>means with their 95 % intervals</figcaption></figure></div>"
        f"{note}</div>\n"
    )


def _curves(report: Report) -> str:
    figures = [
        f"<figure class='card'><h3>{escape(curve.title)}</h3>{drawing}"
        f"<figcaption>{escape(curve.note)}</figcaption></figure>"
        for curve in report.curves
        if (drawing := draw_curve(curve))
    ]
    return f'<div class="curves">{"".join(figures)}</div>' if figures else ""


def _results(results: Sequence[ScenarioResult]) -> str:
    if not results:
        return ""
    head = '<tr><th>scenario</th><th class="pair">0 to 1</th>'
    head += "".join(f'<th class="number">{name}</th>' for name in ("before", "after", "change")) + "</tr>"
    rows = []
    for result in sorted(results, key=lambda result: result.before - result.after):
        change = result.after - result.before
        kind = "soft" if abs(change) < 0.005 else "good" if change > 0 else "bad"
        label = f'<br><span class="soft">{escape(result.label)}</span>' if result.label else ""
        rows.append(
            f'<tr><td>{escape(result.scenario)}{label}</td><td class="pair">{draw_pair(result.before, result.after)}'
            f'</td><td class="number">{result.before:.2f}</td><td class="number">{result.after:.2f}</td>'
            f'<td class="number {kind}">{change:+.2f}</td></tr>'
        )
    return f'<table class="results">{head}{"".join(rows)}</table>'


def _comparison(comparison: Comparison, index: int) -> str:
    # Leave out what both begin with: the system prompt and the task.
    pairs = zip(comparison.before.messages, comparison.after.messages, strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1] and pair[0].get("role") != "assistant", pairs)))
    sides = "".join(
        _side(name, transcript, shared)
        for name, transcript in (("before", comparison.before), ("after", comparison.after))
    )
    return (
        f"<details{' open' if index == 0 else ''}><summary>{escape(comparison.scenario)}</summary>"
        f'<div class="sides">{sides}</div></details>'
    )


def _side(name: str, transcript: Transcript, skip: int) -> str:
    turns = "".join(map(_turn, transcript.messages[skip:]))
    note = f" · {escape(transcript.note)}" if transcript.note else ""
    judge = f"<blockquote>{escape(transcript.explanation)}</blockquote>" if transcript.explanation else ""
    return (
        f'<div class="side {name}"><h3>{name}: {transcript.score:.2f}<span class="soft">{note}</span></h3>{turns}'
        f"{judge}</div>"
    )


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


def _seconds(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    if total <= 0:
        return ""
    bar = key = ""
    for i, (name, value) in enumerate((name, value) for name, value in seconds.items() if value > 0):
        shade = f'<i class="shade{i % _NUM_SHADES}"'
        bar += f'{shade} style="flex:{value / total:.4f}"></i>'
        key += f"<span>{shade}></i>{escape(name)} {duration(value)}</span>"
    return f'<p>{duration(total)} in all</p><div class="bar">{bar}</div><div class="key">{key}</div>'


def duration(seconds: float) -> str:
    """Write seconds for people: `8.4 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    kind = "" if table.columns else ' class="values"'
    return f'<div class="scroll"><table{kind}>{f"<tr>{head}</tr>" if head else ""}{rows}</table></div>'


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _again(report: Report) -> str:
    command = f"<pre>{escape(report.command)}</pre>" if report.command else ""
    rows = [(name, str(value)) for name, value in report.settings.items()]
    return command + (_table(Table(rows=rows)) if rows else "")


def _section(section: Section) -> str:
    text = f"<pre>{escape(section.text)}</pre>" if section.text else ""
    table = _table(section.table) if section.table else ""
    return f"<details><summary>{escape(section.title)}</summary>{text}{table}</details>"


def _finite(value: Any) -> Any:
    """A copy in which infinite numbers and NaN, which JSON lacks, are null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
