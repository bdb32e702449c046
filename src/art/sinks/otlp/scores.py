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
    results = []
    if (reward := finite_number(trajectory.reward)) is not None:
        results.append(Evaluation("reward", reward))
    for judge in _judges(trajectory):
        score = finite_number(trajectory.metrics[f"{judge}_score"])
        if score is not None:
            explanation = _explanation(trajectory, judge) if with_explanations else None
            results.append(Evaluation(judge, score, explanation))
        for name, value in trajectory.metrics.items():
            part = finite_number(value)
            if name.startswith(f"{judge}/") and part is not None:
                results.append(Evaluation(name, part))
    return results


def _judges(trajectory: Trajectory) -> list[str]:
    """Names of the judges that scored the trajectory.

    `art.rewards` leaves the metrics `independent_reward` and `<judge>_score`; the last judge's score is the reward. A
    metric of the user's own may end with `_score` too; then it has neither parts nor an explanation.
    """
    if "independent_reward" not in trajectory.metrics:
        return []
    names = [name.removesuffix("_score") for name in trajectory.metrics if name.endswith("_score")]
    return [
        name
        for name in names
        if trajectory.metrics[f"{name}_score"] == trajectory.reward
        or _explanation(trajectory, name) is not None
        or any(metric.startswith(f"{name}/") for metric in trajectory.metrics)
    ]


def _explanation(trajectory: Trajectory, judge: str) -> str | None:
    opening = f"{judge.upper()} explanation: "
    text = next((log.removeprefix(opening) for log in reversed(trajectory.logs) if log.startswith(opening)), None)
    return None if text is None else short_text(text, MAX_EXPLANATION)
