"""The parts of a report on a training run, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from art.report.estimates import Estimate


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
