"""One step of a run, and the ledgers of steps: what became of every sampled token."""

from __future__ import annotations

import numpy as np

from art.errors import NotFoundError
from art.metrics.catalogue import PLAN_METRICS
from art.metrics.findings import RULES
from art.viewer.answers.run_list import Finding
from art.viewer.answers.step_ledger import Ledger, LedgerAnswer, StepDetail
from art.viewer.index.files import TRAIN
from art.viewer.run_files import RunFiles

_SAMPLED, _TRAINED, _CONTEXT = "ledger/sampled_tokens", "ledger/trained_tokens", "ledger/context_tokens"
_DROPPED = "ledger/dropped_tokens/"
MEANINGS = {
    "trained": PLAN_METRICS[_TRAINED].meaning,
    "context": PLAN_METRICS[_CONTEXT].meaning,
    "no_reward_spread": "the rollouts of the group have equal rewards, so that none is better than another",
    "no_preference_pair": "no rollout of the group is better or worse than this one",
    "truncated": "the token limit cut off an answer of the rollout, and `mask_truncated` is set",
    "sampler_mismatch": "the trainer's log-probs differ from those of the sampler by more than `mismatch` allows",
    "constraint_mismatch": "a token could not be drawn under the grammar or the kept tokens that were recorded",
}
"""What the destinations of sampled tokens mean."""


def describe_step(run: RunFiles, number: int, step: int) -> StepDetail:
    """Describe a step.

    Args:
        number: number of the run in the index.

    Raises:
        NotFoundError: nothing is known of the step.
    """
    with run.refreshed():
        metrics = run.metrics_at(step)
        findings = [finding for finding in run.jobs.findings if finding.step == step]
        steps = run.steps()
        ledger = _ledger(run, step, step)
    counts = run.indexer.store.read(
        "SELECT num_groups, num_rollouts FROM files WHERE run = ? AND split = ? AND step = ?", (number, TRAIN, step)
    )
    if not metrics and not counts:
        raise NotFoundError(f"{run.project}/{run.name} has no step {step}", param="step")
    num_groups, num_rollouts = counts[0] if counts else (0, 0)
    earlier, later = steps[steps < step], steps[steps > step]
    return StepDetail(
        step=step,
        metrics=metrics,
        findings=findings or _named_findings(step, metrics),
        ledger=ledger,
        seconds={phase: value for name, value in metrics.items() if (phase := phase_of(name)) is not None},
        num_groups=num_groups,
        num_rollouts=num_rollouts,
        previous=int(earlier[-1]) if len(earlier) else None,
        next=int(later[0]) if len(later) else None,
    )


def phase_of(name: str) -> str | None:
    """Return the part of a step whose time a metric says; `None` for another metric.

    Example: `publish` for `time/publish_s`, `trainer` for `time/step_trainer_s`, `gpu/rollouts` for
    `time/step_s/gpu/rollouts`.
    """
    if name.startswith("time/step_s/"):
        return name.removeprefix("time/step_s/")
    is_time = name.startswith("time/step_") or name == "time/publish_s"
    return name.removeprefix("time/").removeprefix("step_").removesuffix("_s") if is_time else None


def sum_ledgers(run: RunFiles, first: int | None, last: int | None) -> LedgerAnswer:
    """Sum the ledgers of the steps from `first` to `last`, both included."""
    with run.refreshed():
        ledger = _ledger(run, first, last)
        steps = run.points(_SAMPLED).between(first, last).steps
    return LedgerAnswer(
        ledger=ledger,
        first=int(steps[0]) if len(steps) else None,
        last=int(steps[-1]) if len(steps) else None,
        num_steps=len(steps),
        meanings=MEANINGS,
    )


def _ledger(run: RunFiles, first: int | None, last: int | None) -> Ledger | None:
    """Sum the ledgers of a range of steps. Each logged row has one: a step may have had training jobs before it."""
    names = [name for name in run.metric_names() if name.startswith("ledger/")]
    if _SAMPLED not in names:
        return None
    counts = {}
    for name in names:
        points = run.points(name).between(first, last)
        counts[name] = round(float(np.sum(points.means * points.counts))) if len(points.steps) else 0
    reasons = [name for name, count in counts.items() if name.startswith(_DROPPED) and count]
    if not counts[_SAMPLED]:
        return None
    return Ledger(
        sampled=counts[_SAMPLED],
        trained=counts.get(_TRAINED, 0),
        context=counts.get(_CONTEXT, 0),
        dropped={name.removeprefix(_DROPPED): counts[name] for name in sorted(reasons, key=lambda name: -counts[name])},
    )


def _named_findings(step: int, metrics: dict[str, float]) -> list[Finding]:
    """Findings of a step whose job is not known, by the names that were logged."""
    names = [name.removeprefix("findings/") for name in metrics if name.startswith("findings/")]
    return [
        Finding(step=step, name=name, text=f"{RULES[name].meaning}. {RULES[name].advice}" if name in RULES else name)
        for name in names
    ]
