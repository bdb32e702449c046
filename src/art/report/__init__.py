"""Reports on training runs: a page for people, and a file for programs.

    write_report(Path("out"), Report(title="...", ...))      # out/report.html and out/report.json

This package knows nothing of tasks, servers or judges: the caller fills in a `Report`. The page needs no network and no
script, and every text in it is escaped, because models and tools wrote much of it.
"""

from art.report.page import (
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
    render_report,
    write_report,
)
from art.report.scores import Estimate, estimate, estimate_change

__all__ = [
    "Comparison", "Curve", "Estimate", "Headline", "Report", "ScenarioResult", "Section", "Table", "Transcript",
    "Verdict", "VerdictKind", "estimate", "estimate_change", "render_report", "write_report",
]  # fmt: skip
