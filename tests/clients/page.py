"""The page docs/clients.md, made of the results of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.clients.clients import CLIENTS, ROOT, TASKS

PAGE = ROOT / "docs/clients.md"
COLUMNS = {**TASKS, "trained": "trained"}
INTRODUCTION = (Path(__file__).parent / "page.md").read_text()


@dataclass(frozen=True)
class Cell:
    status: str
    """`yes`, `no` or `not run`."""
    reason: str = ""

    @classmethod
    def of(cls, report: pytest.TestReport, error: str | None) -> Cell:
        """The result of a test: an expected failure is a `no` whose reason is known."""
        if report.passed:
            return cls("yes")
        if hasattr(report, "wasxfail"):
            return cls("no", report.wasxfail.removeprefix("reason: "))
        return cls("not run" if report.skipped else "no", (error or "the test failed").splitlines()[0])


@dataclass
class Table:
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    """The result of each test, by the name of the client and the column of the table."""
    versions: dict[str, str] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    """What is worth knowing about cells that say yes."""

    def add(self, name: str, column: str, cell: Cell, properties: dict[str, Any]) -> None:
        """
        Args:
            properties: `version` of the library, and a `note`, where the test recorded them.
        """
        self.cells[name, column] = cell
        if "version" in properties:
            self.versions[name] = properties["version"]
        if "note" in properties:
            self.notes[name, column] = properties["note"]


def render_page(table: Table) -> str:
    """The page's text. Each distinct reason has a number."""
    reasons: dict[str, int] = {}
    rows = []
    for name in CLIENTS:
        cells = []
        for column in COLUMNS:
            cell = table.cells[name, column]
            reason = cell.reason or table.notes.get((name, column), "")
            cells.append(f"{cell.status} ({reasons.setdefault(reason, len(reasons) + 1)})" if reason else cell.status)
        rows.append(f"| {name} | {table.versions.get(name, '')} | {' | '.join(cells)} |")
    header = f"| client | version | {' | '.join(COLUMNS.values())} |"
    lines = [header, "| --- " * (len(COLUMNS) + 2) + "|", *rows, ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return INTRODUCTION + "\n" + "\n".join(lines).rstrip("\n") + "\n"
