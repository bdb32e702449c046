"""What a page can show. Parts that are left out, or empty, do not appear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from art.report.estimates import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The one result: a measure before and after training."""

    measure: str
    """What is measured, on what: "judged score on 12 held-out scenarios, 4 rollouts each"."""
    before: Estimate
    after: Estimate
    change: Estimate
    """Of the same scenarios, pair by pair."""
    note: str = ""
    """How to read it."""


VerdictKind = Literal["good", "soft", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of the run, in a sentence, with the reasons and what can be done."""

    kind: VerdictKind
    what: str
    why: Sequence[str] = ()
    to_do: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A measure by training step."""

    title: str
    points: Sequence[tuple[int, float]]
    """(step, value), in the order of the steps."""
    note: str = ""
    bounds: tuple[float, float] | None = None
    """Of the axis; by default those of the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """One held-out scenario; scores are from 0 to 1."""

    scenario: str
    before: float
    after: float
    label: str = ""
    """A few words about it, such as its difficulty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One rollout."""

    messages: Sequence[Mapping[str, Any]]
    """In OpenAI's format."""
    score: float
    explanation: str = ""
    """Of the judge."""
    note: str = ""
    """A few words about how it went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same scenario before and after."""

    scenario: str
    before: Transcript
    after: Transcript


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    """Headings; none for a table of names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Something that the run used or made: tools, scenarios, a prompt. Folded, unless `is_open`."""

    title: str
    text: str = ""
    """Kept as it is, line breaks included."""
    table: Table | None = None
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    title: str
    summary: str
    """One or two sentences: what was trained, on what, with which judge."""
    verdict: Verdict | None = None
    headline: Headline | None = None
    curves: Sequence[Curve] = ()
    scenarios: Sequence[ScenarioResult] = ()
    comparisons: Sequence[Comparison] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by what it was spent on."""
    costs: Table | None = None
    """Requests, tokens and money by who was paid."""
    faults: Sequence[str] = ()
    """What went wrong and what became of it, one sentence each; groups that were left out among them."""
    command: str = ""
    """Repeats the run."""
    settings: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Section] = ()
