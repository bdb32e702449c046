"""What must hold after a kill storm: read from the data directory, and compared with what the client was told."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art.errors import ArtError
from art.storage import checkpoints
from art.storage.layout import DataDir
from benchmarks.storm_client import NAME, PROJECT

CAUSES = (
    r"died \((signal \d|exit status)",
    r"died while starting \((signal \d|exit status)",
    r"art-server died \d+ times",
    r"art-server ended at its start \(",
    r"was started anew",
    r"is in use by another art-server",
)
"""An error that the client saw must say which process is gone, and how it ended."""


@dataclass(slots=True)
class Findings:
    """Counts of what was promised, and the breaches in words."""

    counts: dict[str, int] = field(default_factory=dict)
    breaches: list[str] = field(default_factory=list)


def read_record(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(data_dir: Path, record: list[dict[str, Any]]) -> Findings:
    found = Findings()
    database = sqlite3.connect(f"file:{DataDir(data_dir).database}?mode=ro", uri=True)
    for part in (_exchanges, _steps, _jobs):
        found.breaches += part(database, record, found.counts)
    found.breaches += _checkpoints(data_dir, found.counts)
    found.breaches += _errors(record, found.counts)
    database.close()
    return found


def _exchanges(database: sqlite3.Connection, record: list[dict[str, Any]], counts: dict[str, int]) -> Iterator[str]:
    """Every answer that the client has got is stored, with the same text."""
    stored = {row[0]: json.loads(row[1])["content"] for row in database.execute("SELECT id, message FROM exchanges")}
    answers = [line for line in record if "exchange" in line]
    counts["answers"], counts["answers stored"] = len(answers), len(stored)
    for line in answers:
        if line["exchange"] not in stored:
            yield f"the answer {line['exchange']} is lost"
        elif stored[line["exchange"]] != line["text"]:
            yield f"the answer {line['exchange']} is stored with another text"


def _steps(database: sqlite3.Connection, record: list[dict[str, Any]], counts: dict[str, int]) -> Iterator[str]:
    """Every sampled token of the rollouts of a finished step was trained, or is accounted for."""
    num_tokens = dict(database.execute("SELECT id, length(completion) / 4 FROM exchanges"))
    steps = [line for line in record if "step" in line]
    trained = [exchange for line in steps for exchange in line["exchanges"]]
    counts["steps"], counts["answers in finished steps"] = len(steps), len(trained)
    if len(set(trained)) != len(trained):
        yield "an answer was trained in two steps"
    if len({line["step"] for line in steps}) != len(steps):
        yield "two steps have the same number"
    for line in steps:
        ledger = line["metrics"]
        sampled = sum(num_tokens.get(exchange, 0) for exchange in line["exchanges"])
        dropped = sum(value for name, value in ledger.items() if name.startswith("ledger/dropped_tokens/"))
        accounted = ledger["ledger/trained_tokens"] + ledger["ledger/context_tokens"] + dropped
        if not sampled == ledger["ledger/sampled_tokens"] == accounted:
            yield f"step {line['step']}: {sampled} tokens were sampled, its ledger has {ledger}"


def _jobs(database: sqlite3.Connection, record: list[dict[str, Any]], counts: dict[str, int]) -> Iterator[str]:
    """Every finished step is a job that succeeded once; none is left half-way."""
    status = [json.loads(row[0]) for row in database.execute("SELECT status FROM jobs")]
    states = Counter(job["state"] for job in status)
    succeeded = Counter(job["step"] for job in status if job["state"] == "succeeded")
    (step,) = next(iter(database.execute("SELECT step FROM models")))
    counts["jobs that succeeded"], counts["jobs that failed"] = states["succeeded"], states["failed"]
    if sorted(succeeded.elements()) != list(range(1, step + 1)):
        yield f"the model is at step {step}, and steps that succeeded are {sorted(succeeded.elements())}"
    yield from (f"step {line['step']} has no job" for line in record if line.get("step", step) not in succeeded)
    unfinished = states["queued"] + states["running"]
    if unfinished:
        yield f"{unfinished} jobs were not finished"


def _checkpoints(data_dir: Path, counts: dict[str, int]) -> Iterator[str]:
    """All are whole."""
    folder = DataDir(data_dir).model(PROJECT, NAME).checkpoints
    steps = checkpoints.list_steps(folder)
    counts["checkpoints"] = len(steps)
    if steps != list(range(len(steps))):
        yield f"there are checkpoints {steps}"
    for step in steps:
        try:
            checkpoints.verify(folder / f"{step:04d}")
        except ArtError as error:
            yield str(error)


def _errors(record: list[dict[str, Any]], counts: dict[str, int]) -> Iterator[str]:
    errors = [line for line in record if "error" in line]
    counts["errors that the client saw"] = len(errors)
    for line in errors:
        if not any(re.search(cause, line["message"]) for cause in CAUSES):
            yield f"an error during {line['during']} names no cause: {line['error']}: {line['message']}"
