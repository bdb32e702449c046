"""Follows the jobs of one run in the server's database: their states, and what training steps measured and said."""

from __future__ import annotations

from array import array
from typing import Any

import orjson

from art.metrics.findings import RULES
from art.protocol.job_states import ENDED
from art.viewer.answers.run_list import Finding, Job
from art.viewer.conversation import Row, mapping, number, text_or_none, whole
from art.viewer.database import ReadOnlyDatabase
from art.viewer.live.state import TRAINING_KINDS
from art.viewer.reads.columns import Columns

MOST_FINDINGS = 1000
_MOST_JOBS = 20
_FINDING = "findings/"


class JobTable:
    """The jobs of one run. `refresh` reads those that are new or had not ended."""

    def __init__(self, database: ReadOnlyDatabase, project: str, name: str) -> None:
        self._database = database
        self._run = (project, name)
        self.columns = Columns()
        """Metrics of steps that training jobs made."""
        self.times: tuple[array[int], array[float]] = (array("q"), array("d"))
        """Step and end, in Unix time, of each training job."""
        self.origins: list[str] = []
        """Where checkpoints were forked or pulled from."""
        self.findings: list[Finding] = []
        """Findings in the order of steps; the newest `MOST_FINDINGS`."""
        self._settled = 0
        """All jobs with a row id up to this have ended, and were read."""
        self._seen: set[int] = set()
        """Row ids above `_settled` of jobs that have ended, and were read."""
        self._newest: dict[int, Job] = {}

    def refresh(self) -> None:
        """Read new jobs, and those that had not ended."""
        rows = self._database.read(
            "SELECT rowid, kind, state, status FROM jobs WHERE project = ? AND name = ? AND rowid > ? ORDER BY rowid",
            (*self._run, self._settled),
        )
        all_ended = True
        for row_id, kind, state, text in rows:
            status = _decode(text)
            if (job := _job(status, kind, state)) is not None:
                self._newest[row_id] = job
            has_ended = state in ENDED
            if has_ended and row_id not in self._seen:
                self._seen.add(row_id)
                self._note(kind, state, status)
            all_ended = all_ended and has_ended
            if all_ended:
                self._settled = row_id
        self._seen = {row_id for row_id in self._seen if row_id > self._settled}
        for row_id in sorted(self._newest)[:-_MOST_JOBS]:
            if row_id <= self._settled:
                del self._newest[row_id]

    @property
    def newest(self) -> list[Job]:
        """The newest jobs, newest first."""
        return [self._newest[row_id] for row_id in sorted(self._newest, reverse=True)[:_MOST_JOBS]]

    def training_job(self) -> Job | None:
        """Return the newest job that trains."""
        return next((job for job in self.newest if job.kind in TRAINING_KINDS), None)

    def _note(self, kind: str, state: str, status: Row) -> None:
        """Take what a job that has ended measured and said."""
        if state != "succeeded":
            return
        if (origin := text_or_none(mapping(status.get("result")).get("origin"))) is not None:
            self.origins.append(origin)
        step = whole(status.get("step"))
        if kind not in TRAINING_KINDS or step is None:
            return
        metrics = mapping(status.get("metrics"))
        if status.get("trained") is not False:
            self.columns.add(step, metrics)
            if (ended_at := number(status.get("ended_at"))) is not None:
                self.times[0].append(step)
                self.times[1].append(ended_at)
        self.findings += name_findings(step, status.get("findings"), metrics)
        del self.findings[:-MOST_FINDINGS]


def name_findings(step: int, texts: Any, metrics: Row) -> list[Finding]:
    """Make the findings of a step from its sentences. Rules of the catalogue are recognised by what they mean."""
    broken = [name.removeprefix(_FINDING) for name in metrics if name.startswith(_FINDING)]
    findings = []
    for text in texts if isinstance(texts, list) else []:
        if isinstance(text, str):
            name = next((name for name in broken if name in RULES and RULES[name].meaning in text), None)
            findings.append(Finding(step=step, name=name, text=text))
    return findings


def _decode(text: Any) -> Row:
    try:
        return mapping(orjson.loads(text))
    except (TypeError, ValueError):
        return {}


def _job(status: Row, kind: str, state: str) -> Job | None:
    fields = {name: number(status.get(name)) for name in ("created_at", "started_at", "ended_at")}
    error = text_or_none(mapping(status.get("error")).get("message"))
    try:
        return Job.model_validate(
            {"id": str(status.get("job_id")), "kind": kind, "state": state, "error": error,
             "step": whole(status.get("step")), **fields}
        )  # fmt: skip
    except ValueError:  # a kind or state of a newer version
        return None
