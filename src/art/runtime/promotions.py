"""Promote checkpoints: judge the gate on held-out scores, let the engine load the checkpoint, record the decision.

Until a checkpoint is loaded and recorded, and if either fails, `project/name@promoted` goes on to mean the one before.
The history in SQLite has every decision about a model's promoted checkpoint, refusals included.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import sqlite3
import statistics
import time
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.errors import ConfigError, ConflictError, PromotionError
from art.protocol.organisation.promotions import (
    Decision,
    Gate,
    Measurement,
    PromoteRequest,
    Promotion,
    PromotionHistory,
    PromotionRecord,
    Verdict,
)
from art.report.scores import MIN_SCENARIOS, Score, Values, measure_improvement, tail_of_look
from art.runtime.models import Models
from art.runtime.registry import RegisteredModel, set_promoted
from art.storage.database import Database, uninterrupted
from art.storage.jsonl import read_lines
from art.storage.layout import ModelPaths, validate_name

logger = logging.getLogger(__name__)


Row = dict[str, Any]


def check_held_out(split: str) -> str:
    """Return `split` if its rollouts were not learnt from.

    Raises:
        ConfigError: it is `train`.
        InvalidRequestError: it is not a valid name.
    """
    if split == "train":
        raise ConfigError(
            "the rollouts of split 'train' were learnt from, so they cannot show that a checkpoint is better; name a "
            "held-out split such as 'val' or 'test'",
            param="split",
        )
    return validate_name(split, param="split")


def logged_steps(paths: ModelPaths, split: str) -> list[int]:
    """Return the steps at which rollouts of a split were logged, in order."""
    folder = paths.trajectories(split, 0).parent
    return sorted(int(file.stem) for file in folder.glob("*.jsonl") if file.stem.isdecimal())


def logged_scores(path: Path, metric: str) -> dict[str, list[float]]:
    """Read the values of the rollouts in one file of a log, by scenario.

    Rollouts that failed through no fault of the policy (`infra_fault`) and rollouts without the metric are left out.

    Args:
        metric: `reward`, or the name of a metric of rollouts.
    """
    values: dict[str, list[float]] = {}
    for _, group in read_lines(path):
        for rollout in (group or {}).get("trajectories", ()):
            metadata = rollout.get("metadata") or {}
            value = rollout.get("reward") if metric == "reward" else (rollout.get("metrics") or {}).get(metric)
            if metadata.get("outcome") == "infra_fault" or not isinstance(value, (int, float)):
                continue
            if math.isfinite(value):
                values.setdefault(_scenario(group or {}, rollout), []).append(float(value))
    return values


def _scenario(group: Row, rollout: Row) -> str:
    """Name the scenario of a rollout: `scenario_id` in its metadata or its group's, else a hash of its prompt."""
    for record in (rollout, group):
        if (name := (record.get("metadata") or {}).get("scenario_id")) is not None:
            return str(name)
    asked: list[Any] = []
    for message in rollout.get("messages_and_choices", ()):
        if message.get("role") not in ("system", "developer", "user"):
            break
        asked.append(message)
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Scores of two checkpoints on held-out scenarios."""

    source: str
    reference_step: int
    reference: Values
    candidate: Values
    num_choices: int
    """Number of measured checkpoints that the candidate may have been chosen from by these scores."""

    @property
    def digest(self) -> str:
        content = [self.reference_step, sorted(self.reference.items()), sorted(self.candidate.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def logged_evidence(paths: ModelPaths, gate: Gate, *, step: int, reference_step: int) -> Evidence:
    """Read the scores of both checkpoints from the log of a model.

    Raises:
        ConfigError: the split of the gate is not held out.
        StorageError: the log cannot be read.
    """
    split = check_held_out(gate.split)
    steps = logged_steps(paths, split)
    oldest = reference_step if step > reference_step else -1
    choices = {step, *(one for one in steps if one > oldest and one != reference_step)}
    return Evidence(
        source=f"{gate.metric} of split {split!r} in the log",
        reference_step=reference_step,
        reference=logged_scores(paths.trajectories(split, reference_step), gate.metric),
        candidate=logged_scores(paths.trajectories(split, step), gate.metric),
        num_choices=len(choices),
    )


def measured_evidence(measured: Measurement, *, reference_step: int) -> Evidence:
    """Take the scores that the caller measured.

    Raises:
        ConflictError: they are of another reference than the promoted checkpoint.
    """
    if measured.reference_step != reference_step:
        raise ConflictError(
            f"the scores compare with step {measured.reference_step}, but step {reference_step} is what the candidate "
            "must beat now; measure again"
        )
    reference, candidate = (
        {str(index): values for index, values in enumerate(side)} for side in (measured.reference, measured.candidate)
    )
    return Evidence(measured.source, reference_step, reference, candidate, num_choices=1)


def judge(evidence: Evidence, require: float, *, step: int, refused: Collection[str], model: str) -> Verdict:
    """Decide whether `evidence` shows that `step` is better than the reference by more than `require`.

    Args:
        refused: hashes of the evidence that was refused since the last promotion. Each was a look at the reference.
        model: `project/name`, for the commands in the reason.
    """
    look = max(evidence.num_choices, 1 + len(set(refused) - {evidence.digest}))
    score = measure_improvement(evidence.reference, evidence.candidate, look=look)
    verdict = Verdict(
        passed=False, reason="", require=require, source=evidence.source, reference_step=evidence.reference_step,
        num_scenarios=0 if score is None else score.num, look=look, confidence=1 - tail_of_look(look),
    )  # fmt: skip
    if score is not None:
        common = evidence.reference.keys() & evidence.candidate.keys()
        means = [
            statistics.fmean(statistics.fmean(side[name]) for name in common)
            for side in (evidence.reference, evidence.candidate)
        ]
        verdict = verdict.model_copy(
            update={
                "reference": means[0], "candidate": means[1], "difference": score.mean, "low": score.low,
                "method": score.method,
            }
        )  # fmt: skip
        verdict.passed = has_figures(verdict) and score.low is not None and score.low > require
    return verdict.model_copy(update={"reason": _reason(verdict, score, evidence, step, model)})


def has_figures(verdict: Verdict) -> bool:
    """Whether enough scenarios were compared. What was not compared could not pass by chance, so it is no look."""
    return verdict.low is not None and verdict.num_scenarios >= MIN_SCENARIOS[verdict.method or "tango"]


def _reason(verdict: Verdict, score: Score | None, evidence: Evidence, step: int, model: str) -> str:
    if score is None or score.low is None or not has_figures(verdict):
        have = f"step {evidence.reference_step} has {len(evidence.reference)} and step {step} {len(evidence.candidate)}"
        return (
            f"{evidence.source}: {verdict.num_scenarios} scenarios were measured with both checkpoints ({have}), and "
            f"at least {MIN_SCENARIOS['tango']} are needed, or {MIN_SCENARIOS['t']} unless each has one value of 0 or "
            "1. Log an evaluation of both on the same scenarios, with `scenario_id` in the metadata of each rollout, "
            f"or measure them now: `art promote {model}@{step} --require {verdict.require:g} --task TASK --games 200`"
        )
    figures = (
        f"{evidence.source}: step {step} has {verdict.candidate:.3f} and step {evidence.reference_step} "
        f"{verdict.reference:.3f} on {score.num} scenarios, a difference of {score.mean:+.3f} that is above "
        f"{score.low:+.3f} with {verdict.confidence:.2%} confidence"
        + (f" (look {verdict.look} at this reference)" if verdict.look > 1 else "")
    )
    if verdict.passed:
        return f"{figures}, so it is above the required {verdict.require:+g}"
    if score.mean <= verdict.require:
        return f"{figures}. More than {verdict.require:+g} is required, so the promoted checkpoint stays; train on"
    more = "fresh scenarios count as one look" if verdict.look > 1 else "the interval shrinks with their square root"
    return (
        f"{figures}. The interval must lie above {verdict.require:+g}, so this may be chance. Measure on more "
        f"scenarios ({more}): `art promote {model}@{step} --require {verdict.require:g} --task TASK --games "
        f"{_needed_games(score, verdict.require)} --seed N`"
    )


def _needed_games(score: Score, require: float) -> int:
    """Number of scenarios at which the same difference would pass with room to spare, from 2 to 50 times as many."""
    assert score.low is not None
    factor = ((score.mean - score.low) / (score.mean - require)) ** 2
    return round(score.num * min(50.0, max(2.0, 1.5 * factor)))


_SCHEMA = """
CREATE TABLE IF NOT EXISTS promotions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, project TEXT NOT NULL, name TEXT NOT NULL, at REAL NOT NULL,
    step INTEGER NOT NULL, previous_step INTEGER, decision TEXT NOT NULL, key_id TEXT NOT NULL, note TEXT NOT NULL,
    verdict TEXT, evidence TEXT
);
CREATE INDEX IF NOT EXISTS promotions_of_model ON promotions (project, name, number);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDecision:
    """A decision that is to be recorded."""

    step: int
    previous_step: int | None
    decision: Decision
    key_id: str
    note: str
    verdict: Verdict | None
    evidence: str | None
    """Hash of the compared values; the same evidence is not another look. `None` if nothing could be compared."""


class PromotionStore:
    """Stores decisions about promotions. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def start(self) -> None:
        await self._database.run(lambda db: db.executescript(_SCHEMA))

    async def add(self, project: str, name: str, new: NewDecision) -> None:
        """Record a decision. Unless it is a refusal, its step becomes the promoted one in the same transaction."""
        now = time.time()
        row = (
            project, name, now, new.step, new.previous_step, new.decision, new.key_id, new.note,
            None if new.verdict is None else new.verdict.model_dump_json(), new.evidence,
        )  # fmt: skip

        def insert(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO promotions (project, name, at, step, previous_step, decision, key_id, note, verdict, "
                f"evidence) VALUES ({', '.join('?' * len(row))})",
                row,
            )
            if new.decision != "refused":
                set_promoted(db, project, name, new.step, now)

        await self._database.run(insert)

    async def records(self, project: str, name: str) -> list[PromotionRecord]:
        """Return the decisions about a model, oldest first."""
        rows = await self._read(
            "SELECT number, at, step, previous_step, decision, key_id, note, verdict FROM promotions "
            "WHERE project = ? AND name = ? ORDER BY number",
            project,
            name,
        )
        return [
            PromotionRecord(
                number=number, at=at, step=step, previous_step=previous, decision=decision, key_id=key_id, note=note,
                verdict=None if verdict is None else Verdict.model_validate_json(verdict),
            )
            for number, at, step, previous, decision, key_id, note, verdict in rows
        ]  # fmt: skip

    async def refused_evidence(self, project: str, name: str) -> set[str]:
        """Return the hashes of the evidence that was refused since a checkpoint was last promoted."""
        rows = await self._read(
            "SELECT evidence FROM promotions WHERE project = ?1 AND name = ?2 AND decision = 'refused' AND number > "
            "coalesce((SELECT max(number) FROM promotions WHERE project = ?1 AND name = ?2 AND decision != 'refused'), "
            "0)",
            project,
            name,
        )
        return {evidence for (evidence,) in rows if evidence is not None}

    async def _read(self, sql: str, project: str, name: str) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._database.read, sql, (project, name))


ChangeLock = Callable[[RegisteredModel], AbstractAsyncContextManager[None]]
"""Function that makes a context manager in which nobody else promotes or deletes checkpoints of a model."""


class Promotions:
    """Promotes checkpoints of models, and keeps the history of it."""

    def __init__(
        self, models: Models, store: PromotionStore, changing: ChangeLock, *, required: float | None = None
    ) -> None:
        """
        Args:
            required: bound of a gate that every promotion has to pass; `None` if each caller chooses.
        """
        self.required = required
        self._models = models
        self._store = store
        self._changing = changing

    async def promote(self, project: str, name: str, request: PromoteRequest, key_id: str) -> Promotion:
        """Make a checkpoint the promoted one of its model, if it passes the gate of the request or is forced.

        Nothing is compared and recorded if it is the promoted one already.

        Args:
            key_id: id of the key that asks, for the history.

        Raises:
            NotFoundError: there is no such model or published checkpoint.
            ConfigError: the model's engine cannot serve a step beside the newest, the split is not held out, or the
                request asks for less than the server requires.
            PromotionError: the checkpoint does not pass the gate. The refusal is recorded.
            ConflictError: measured scores compare with another checkpoint than the promoted one.
            CorruptCheckpointError, AdapterError, HandshakeError: the checkpoint cannot be served.
            ProcessError: the engine cannot start, or another promotion or deletion took too long.
        """
        model, host = self._models.find(project, name)
        step = request.step
        if host.one_policy:
            raise ConfigError(
                f'{model.key} cannot have a promoted checkpoint: with `weights="merged"` vLLM serves one step at a '
                'time, the newest. Register the model with `weights="lora"` or the embedded engine, or fork step '
                f"{step} to a model of another name on a server of its own",
                param="step",
            )
        request = self._with_required_gate(request)
        async with self._changing(model):
            path = await asyncio.to_thread(self._models.folder, project, name, step)
            previous = self._models.find(project, name)[0].promoted_step
            if step == previous:
                return Promotion(step=step, inference_name=f"{model.key}@promoted", previous_step=step)
            decision = await self._decide(model, previous, request, key_id)
            if decision.decision == "refused":
                await self._store.add(project, name, decision)
                assert decision.verdict is not None
                refusal = f"step {step} of {model.key} is not promoted. {decision.verdict.reason}"
                raise PromotionError(refusal if self.required is None else f"{refusal}. {self._rule()}")
            await host.adapters.load(model.adapter_id(step), path)
            await uninterrupted(self._record(model, decision))
        logger.info("promoted step %d of %s (%s); before it was %s", step, model.key, decision.decision, previous)
        return Promotion(
            step=step, inference_name=f"{model.key}@promoted", previous_step=previous, verdict=decision.verdict
        )

    async def history(self, project: str, name: str) -> PromotionHistory:
        """Return all decisions about the promoted checkpoint of a model.

        Raises:
            NotFoundError: there is no such model.
        """
        self._models.find(project, name)
        return PromotionHistory(promotions=await self._store.records(project, name))

    async def _record(self, model: RegisteredModel, decision: NewDecision) -> None:
        """Record a promotion, and let requests to the promoted name get its checkpoint."""
        await self._store.add(model.project, model.name, decision)
        self._models.set_promoted(model.key, decision.step)

    def _with_required_gate(self, request: PromoteRequest) -> PromoteRequest:
        """Give the request the gate that the server requires, unless its own asks for as much.

        Raises:
            ConfigError: its own asks for less.
        """
        if self.required is None:
            return request
        if request.gate is None:
            return request.model_copy(update={"gate": Gate(require=self.required)})
        if request.gate.require < self.required:
            raise ConfigError(
                f"`require` is {request.gate.require:g}, which is less than {self.required:g}. {self._rule()}. Ask for "
                f"{self.required:g} or more, or leave `require` out",
                param="require",
            )
        return request

    def _rule(self) -> str:
        return (
            f"This server requires {self.required:+g} of every promotion (`promotion.require` in its configuration), "
            "and only a key with scope `admin` may force one"
        )

    async def _decide(
        self, model: RegisteredModel, previous: int | None, request: PromoteRequest, key_id: str
    ) -> NewDecision:
        decision: Decision = "forced" if request.force else "ungated"
        verdict, evidence = None, None
        if (gate := request.gate) is not None:
            scores = await self._evidence(model, previous or 0, request)
            refused = await self._store.refused_evidence(model.project, model.name)
            verdict = await asyncio.to_thread(
                judge, scores, gate.require, step=request.step, refused=refused, model=model.key
            )
            evidence = scores.digest if has_figures(verdict) else None
            decision = "passed" if verdict.passed else decision if request.force else "refused"
        return NewDecision(
            step=request.step, previous_step=previous, decision=decision, key_id=key_id, note=request.note,
            verdict=verdict, evidence=evidence,
        )  # fmt: skip

    async def _evidence(self, model: RegisteredModel, reference: int, request: PromoteRequest) -> Evidence:
        assert request.gate is not None
        if request.gate.measured is not None:
            return measured_evidence(request.gate.measured, reference_step=reference)
        paths = self._models.paths(model)
        return await asyncio.to_thread(
            logged_evidence, paths, request.gate, step=request.step, reference_step=reference
        )
