"""What a benchmark gives back, and how it is shown: Markdown to read, JSON to compare."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

_PACKAGES = ("torch", "transformers", "peft", "trl", "numpy", "tokenizers", "uvicorn")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{_number(self.median)} ({_number(self.low)} to {_number(self.high)})"


Cell = str | int | float | Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A table whose rows have the same columns, and what a reader must know beside it."""

    summary: str
    rows: list[dict[str, Cell]]
    notes: list[str] = field(default_factory=list)
    clock: Literal["CPU", "wall"] = "CPU"
    """Which of two columns of times a plot shows."""


def markdown(name: str, result: Result) -> str:
    """A section with the table of one benchmark."""
    headings = list(result.rows[0])
    table = [headings, *([_text(row[heading]) for heading in headings] for row in result.rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(headings))]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    notes = [f"- {note}" for note in result.notes]
    return "\n".join([f"## {name}", "", result.summary, "", *lines, *([""] if notes else []), *notes, ""])


def environment(device: str, argv: Sequence[str]) -> dict[str, Any]:
    """When, where and with what: date, command, machine, versions, commit."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *argv]),
        "machine": _machine(device),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
    }


def environment_markdown(about: dict[str, Any]) -> str:
    machine, versions = about["machine"], about["versions"]
    return "\n".join(
        [
            f"# Benchmarks of {about['date']}",
            "",
            f"    {about['command']}",
            "",
            "- Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()),
            "- Versions: " + ", ".join(f"{key} {value}" for key, value in versions.items()),
            f"- Commit: {about['commit']}",
            "- Figures are medians, with the range of all rounds in brackets. Contenders take turns: trust the ratios.",
            "",
        ]
    )


def to_json(about: dict[str, Any], results: dict[str, Result]) -> dict[str, Any]:
    return {**about, "results": {name: asdict(result) for name, result in results.items()}}


def _versions() -> dict[str, str]:
    """Of the packages that are there: not every benchmark needs all."""
    return {dist.name: dist.version for name in _PACKAGES for dist in metadata.distributions(name=name)}


def _machine(device: str) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine: dict[str, Any] = {"system": platform.system(), "CPU": _cpu_model(), "cores": cores}
    if hasattr(os, "getloadavg"):
        machine["load average at the start"] = round(os.getloadavg()[0], 1)
    if device == "cuda":
        import torch

        machine["GPU"] = torch.cuda.get_device_name()
    return machine


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit() -> str:
    """Of the checkout, with a mark if the sources differ from it."""
    root = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with uncommitted changes" if changed else "")


def middle(cell: Cell) -> float:
    """The median of a measured cell, for a plot."""
    return cell.median if isinstance(cell, Spread) else float(cell)


def error_bar(cells: Sequence[Cell]) -> list[list[float]]:
    """Distances from the medians down to the lowest and up to the highest, as matplotlib wants them."""
    spreads = [cell if isinstance(cell, Spread) else Spread.of([float(cell)]) for cell in cells]
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]


def _text(cell: Cell) -> str:
    return _number(cell) if isinstance(cell, float) else str(cell)


def _number(value: float) -> str:
    """Three significant digits, without an exponent where a reader does not need one."""
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1e}"
