"""The reward of a trajectory and the scores of its judges, as evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from art.sinks.otlp.content import short_text
from art.trajectory import Trajectory, finite_number

MAX_EXPLANATION = 20_000
"""Characters of an explanation that are sent."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One result of an evaluation, OpenTelemetry's `gen_ai.evaluation.result`."""

    name: str
    """`reward`, the name of a judge, or `judge/part` for a part of its score."""
    value: float
    explanation: str | None = None
    """The judge's reasons, in its own words. They may quote the conversation."""


def evaluations(trajectory: Trajectory, *, with_explanations: bool) -> list[Evaluation]:
    """Return the reward and each judge's score. A reward that is not a finite number is left out."""
    found = []
    if (reward := finite_number(trajectory.reward)) is not None:
        found.append(Evaluation("reward", reward))
    for judge in _judges(trajectory):
        score = finite_number(trajectory.metrics[f"{judge}_score"])
        if score is not None:
            explanation = _explanation(trajectory, judge) if with_explanations else None
            found.append(Evaluation(judge, score, explanation))
        for name, value in trajectory.metrics.items():
            part = finite_number(value)
            if name.startswith(f"{judge}/") and part is not None:
                found.append(Evaluation(name, part))
    return found


def _judges(trajectory: Trajectory) -> list[str]:
    """Names of the judges that scored the trajectory: `art.rewards` leaves these two metrics for each."""
    if "independent_reward" not in trajectory.metrics:
        return []
    return [name.removesuffix("_score") for name in trajectory.metrics if name.endswith("_score")]


def _explanation(trajectory: Trajectory, judge: str) -> str | None:
    opening = f"{judge.upper()} explanation: "
    given = next((log.removeprefix(opening) for log in reversed(trajectory.logs) if log.startswith(opening)), None)
    return None if given is None else short_text(given, MAX_EXPLANATION)
