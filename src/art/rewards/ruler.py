"""RULER: rewards without labels, from a language model that compares the trajectories of a group.

    group = await art.rewards.ruler_score_group(group, "openai/o3")

Training needs only the differences within a group. So the judge sees the whole group, and scores how well each
trajectory did compared with the others, without knowing a right answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from art.errors import JudgeError
from art.messages import Messages, Tools
from art.model import Model
from art.rewards.asking.evidence import Evidence, evidence_of
from art.rewards.asking.grader import Grader, Rubric, run_together
from art.rewards.asking.rounds import compare_passes, grade_in_rounds, shrink
from art.rewards.judge import Judgement, Verdict
from art.rewards.outcomes import score_group
from art.rewards.settings import JudgeSettings
from art.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

DEFAULT_JUDGE = "openai/o3"
DEFAULT_RUBRIC = """\
- Reaching the goal of the task counts most: a trajectory that does scores clearly above every one that does not.
- Among those that reach it, the direct way scores above detours, repeated calls and needless text.
- Among those that do not, the one that came closer, or that failed more honestly, scores above the other.
- The distance of two scores says how far apart the trajectories are: nearly equal work gets nearly equal scores."""


class TrajectoryScore(BaseModel):
    """The judge's score for one of the conversations that were passed to `ruler`."""

    trajectory_id: str
    """Number of the conversation in the order in which they were passed, from "1"."""
    explanation: str
    score: float
    """The score, 0 to 1."""


class Ruler:
    """A judge that compares the trajectories of a group. One instance can score many groups at once."""

    def __init__(
        self,
        judge_model: str | Model[Any, Any] = DEFAULT_JUDGE,
        *,
        rubric: Rubric = DEFAULT_RUBRIC,
        extra_litellm_params: Mapping[str, Any] | None = None,
        settings: JudgeSettings | None = None,
        name: str = "ruler",
    ) -> None:
        """
        Args:
            judge_model: a model name in litellm's form (`openai/o3`, `ollama_chat/qwen3:8b`), or an `art.Model`,
                trainable or not.
            rubric: what makes a trajectory good, in prose or as criteria.
            extra_litellm_params: further arguments of each request: `base_url`, `api_key`, `temperature`, ...
            settings: time limits, attempts, passes, prices, budget and cache.
            name: name of the judge in metrics: `<name>_score` and `costs/judge/<name>`.
        """
        self.name = name
        self.settings = settings or JudgeSettings()
        self.grader = Grader(
            judge_model, rubric, kind="relative", params=extra_litellm_params, settings=self.settings, name=name
        )

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        """Score the trajectories of a group. Equal ones are shown once and get the same verdict.

        Raises:
            JudgeError: there are no usable scores.
        """
        evidence = [evidence_of(trajectory) for trajectory in group]
        distinct = list({item.digest: item for item in evidence}.values())
        if not distinct:
            return Judgement(verdicts=[])
        if len(distinct) == 1 and len(evidence) > 1:
            logger.warning("all %d trajectories of a group are equal, so they get the same score", len(evidence))
        async with self.grader.deadline(len(evidence)):
            judgement = await self._compare_distinct(distinct)
        place = {item.digest: i for i, item in enumerate(distinct)}
        return replace(judgement, verdicts=[judgement.verdicts[place[item.digest]] for item in evidence])

    async def _compare_distinct(self, evidence: list[Evidence]) -> Judgement:
        order = list(range(len(evidence)))
        self.grader.rng(evidence).shuffle(order)
        if self.settings.passes == 1 or len(evidence) == 1:
            return await self._one_pass(evidence, order, 0)
        passes = await run_together([self._one_pass(evidence, order, 0), self._one_pass(evidence, order[::-1], 1)])
        first, second = ([verdict.score for verdict in judgement.verdicts] for judgement in passes)
        agreement = compare_passes(first, second)
        if self.settings.on_disagreement == "set_aside" and agreement.disagreement > self.settings.max_disagreement:
            raise JudgeError(
                f"the judge disagrees with itself: its scores in two orders differ by {agreement.disagreement:.2f} "
                f"(root mean square), and at most {self.settings.max_disagreement:.2f} is allowed"
            )
        scores = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        if self.settings.on_disagreement == "shrink":
            scores = shrink(scores, agreement.reliability)
        verdicts = [
            Verdict(
                score=score,
                explanation=a.explanation,
                parts={k: (a.parts[k] + b.parts[k]) / 2 for k in a.parts} | {"pass_1": a.score, "pass_2": b.score},
            )
            for score, a, b in zip(scores, passes[0].verdicts, passes[1].verdicts, strict=True)
        ]
        judgement = self.grader.join(passes, verdicts)
        further = {"judge_disagreement": agreement.disagreement, "judge_reliability": agreement.reliability}
        return replace(judgement, metrics=judgement.metrics | further)

    async def _one_pass(self, evidence: list[Evidence], order: list[int], index: int) -> Judgement:
        return await self.grader.grade_cached(
            evidence, ["pass", index], lambda: grade_in_rounds(self.grader, evidence, order)
        )


async def ruler(
    message_lists: Sequence[Messages],
    judge_model: str | Model[Any, Any] = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: Rubric = DEFAULT_RUBRIC,
    tools: Tools | None = None,
    *,
    debug: bool = False,
    settings: JudgeSettings | None = None,
) -> list[TrajectoryScore]:
    """Have a judge model compare conversations, and return a score for each, in the order of `message_lists`.

    Args:
        tools: the tools that the agents could call.
        debug: log the judge's scores and explanations.

    Raises:
        JudgeError: the judge gave no usable scores.
    """
    judge = Ruler(judge_model, rubric=rubric, extra_litellm_params=extra_litellm_params, settings=settings)
    rollouts = [Trajectory(messages_and_choices=list(messages), tools=tools) for messages in message_lists]
    judgement = await judge.judge(TrajectoryGroup(rollouts))
    scores = [
        TrajectoryScore(trajectory_id=str(i), explanation=verdict.explanation, score=verdict.score)
        for i, verdict in enumerate(judgement.verdicts, start=1)
    ]
    if debug:
        logger.warning("RULER: %s", json.dumps([score.model_dump() for score in scores], indent=2))
    return scores


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: str | Model[Any, Any] = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: Rubric = DEFAULT_RUBRIC,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
    settings: JudgeSettings | None = None,
) -> TrajectoryGroup | None:
    """Have a judge model compare a group's trajectories, and return a copy of the group with the scores as rewards.

    Each trajectory gets the metrics `ruler_score` and `independent_reward` (its reward before), with two passes also
    `ruler/pass_1` and `ruler/pass_2` (the scores of both), the explanation in its logs, and its share of the cost as
    `costs/judge/ruler` if the price is known.

    Args:
        swallow_exceptions: return `None` when there are no usable scores, so that `gather_trajectory_groups` drops the
            group and continues.
        debug: log the judge's scores and explanations.

    Raises:
        JudgeError: there are no usable scores, and `swallow_exceptions` is false.
    """
    judge = Ruler(judge_model, rubric=rubric, extra_litellm_params=extra_litellm_params, settings=settings)
    try:
        scored = await score_group(group, judge)
    except JudgeError as error:
        if not swallow_exceptions:
            raise
        logger.warning("a group is dropped (infra_fault): %s", error)
        return None
    if debug:
        for trajectory in scored:
            logger.warning("RULER: %s %s", trajectory.reward, trajectory.logs[-1:])
    return scored
