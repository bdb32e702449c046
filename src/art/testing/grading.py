"""Grades for a scripted judge: by a function of the messages, by the rewards that rollouts have set, or by conduct.

A grade takes one trajectory of a judge's prompt (`{"id": ..., "context": [...], "messages": [...]}`) and returns its
true score from 0 to 1, optionally with an explanation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from art.rewards import Ruler
from art.rewards.asking.evidence import digest, evidence_of
from art.rewards.judge import Judgement
from art.trajectory import Trajectory, TrajectoryGroup

Score = float | tuple[float, str]
Grade = Callable[[dict[str, Any]], Score]


def transcript(trajectory: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all messages of a trajectory in a judge's prompt: those shared by all trajectories, then its own."""
    return [*trajectory.get("context", []), *trajectory["messages"]]


def grade_messages(score: Callable[[list[dict[str, Any]]], Score]) -> Grade:
    """Make a function that grades trajectories from one that scores messages, e.g. `task.score_messages`."""
    return lambda trajectory: score(transcript(trajectory))


def grade_conduct(trajectory: dict[str, Any]) -> Score:
    """Grade a rollout of any task: it should end with an answer, without failed calls, in few words.

    The score is 0.6 for an end that the agent chose, minus 0.1 for each tool result that begins with "Error" (at most
    three), plus up to 0.4 for brevity: 0.2 at 100 characters.
    """
    messages = transcript(trajectory)
    answers = [message for message in messages if message["role"] == "assistant"]
    calls = [call["function"] for message in answers for call in message.get("tool_calls") or ()]
    ended = bool(answers) and messages[-1] is answers[-1] and bool(str(answers[-1].get("content") or "").strip())
    ended = ended or any(call["name"] == "complete_task" for call in calls)
    errors = sum(str(m.get("content")).startswith("Error") for m in messages if m["role"] == "tool")
    size = sum(len(str(message.get("content") or "")) for message in answers)
    size += sum(len(call["name"]) + len(call["arguments"]) for call in calls)
    score = 0.6 * ended - 0.1 * min(errors, 3) + 0.4 / (1 + size / 100)
    words = "It ends with an answer" if ended else "It has no end"
    return min(max(score, 0.0), 1.0), f"{words}, after {errors} failed calls and {size} characters."


def grade_preferring(pattern: str) -> Grade:
    """Make a function that grades 0.7 if `pattern` matches in the last answer, plus 0.3 times `grade_conduct`."""
    compiled = re.compile(pattern)

    def grade(trajectory: dict[str, Any]) -> Score:
        answers = [str(m.get("content") or "") for m in transcript(trajectory) if m["role"] == "assistant"]
        matches = bool(answers) and compiled.search(answers[-1]) is not None
        conduct = grade_conduct(trajectory)
        assert isinstance(conduct, tuple)
        return 0.7 * matches + 0.3 * conduct[0], f"{pattern!r} is {'' if matches else 'not '}in its answer."

    return grade


class KnownRewards:
    """Grades each trajectory by the reward that its rollout set in this process: a judge that is right for any task.

    known = KnownRewards()
    with ScriptedJudge(known, noise=0.1) as judge:
        ruler = KnowingRuler(known, "openai/judge", extra_litellm_params=params_at(judge.base_url))
        await train_task(model, task, ..., score=GroupScorer(ruler))
    """

    def __init__(self) -> None:
        self._rewards: dict[str, float] = {}
        self._low, self._high = 0.0, 1.0

    def remember(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            if math.isfinite(trajectory.reward):
                self._rewards[digest(evidence_of(trajectory).messages)] = trajectory.reward
                self._low, self._high = min(self._low, trajectory.reward), max(self._high, trajectory.reward)

    def __call__(self, trajectory: dict[str, Any]) -> float:
        """The reward, scaled to 0 to 1. Rewards below 0 or above 1 widen the scale.

        Raises:
            LookupError: `remember` was not called with a rollout of these messages.
        """
        reward = self._rewards.get(digest(transcript(trajectory)))
        if reward is None:
            raise LookupError("no rollout with these messages is known: call `remember` before the judge is asked")
        return (reward - self._low) / (self._high - self._low)


class KnowingRuler(Ruler):
    """A `Ruler` (an LLM judge of groups) that tells `known` the rewards of each group before it asks for scores."""

    def __init__(self, known: KnownRewards, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._known = known

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        self._known.remember(group)
        return await super().judge(group)
