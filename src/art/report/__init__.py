"""What a training run came to, as one page for people and one file for programs.

    write_report(Path("out"), Report(title="...", ...))      # out/report.html and out/report.json

The page knows nothing of tasks, servers or judges: whoever has a run fills in a `Report`. It needs no network and no
script, and every text in it is data, whoever wrote it.
"""

from art.report.estimates import Estimate, estimate, estimate_change
from art.report.page import render_report, write_report
from art.report.parts import (
    Comparison,
    Curve,
    Headline,
    Report,
    ScenarioResult,
    Section,
    Table,
    Transcript,
    Verdict,
    VerdictKind,
)

__all__ = [
    "Comparison",
    "Curve",
    "Estimate",
    "Headline",
    "Report",
    "ScenarioResult",
    "Section",
    "Table",
    "Transcript",
    "Verdict",
    "VerdictKind",
    "estimate",
    "estimate_change",
    "render_report",
    "write_report",
]
