"""Decide whether a checkpoint passes the gate before its promotion, and say why.

    log, or what the caller measured --> values of both checkpoints by scenario --> interval --> verdict

The candidate is compared with the promoted checkpoint, or with step 0 while nothing is promoted.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Collection
from dataclasses import dataclass

from art.errors import ConflictError
from art.protocol.organisation.promotions import Gate, Measurement, Verdict
from art.report.improvement import MIN_SCENARIOS, Values, measure_improvement, tail_of_look
from art.report.scores import Score
from art.runtime.promotion.logged_scores import check_held_out, logged_scores, logged_steps
from art.storage.layout import ModelPaths


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
