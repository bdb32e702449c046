"""RULER: rewards without labels, from a language model that compares the trajectories of a group; and a judge that
grades each trajectory by itself.

    group = await art.rewards.ruler_score_group(group, "openai/o3")

Training needs only the differences within a group. So the judge sees the whole group, and scores how well each
trajectory did compared with the others, without knowing a right answer.

Two passes over a group (judgements in opposite orders) can be compared. Reliability r is the share of the variance
within the group that both agree on, 2 cov / (var + var): 1 for passes that differ at most in level, 0 for unrelated
ones. The mean of two passes has reliability 2r / (1 + r) (Spearman 1910, Brown 1910). Order bias is opposite in the two
passes: it cancels in their mean, and lowers r.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from art.errors import ConfigError, ContextLengthError, JudgeError
from art.messages import Messages, Tools
from art.model import Model
from art.rewards.evidence import Evidence, evidence_of
from art.rewards.grader import Grader, run_together
from art.rewards.judge import Judgement, JudgeSettings, Verdict
from art.rewards.outcomes import score_group
from art.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

DEFAULT_JUDGE = "openai/o3"
DEFAULT_RUBRIC = """\
- Reaching the goal of the task counts most: a trajectory that does scores clearly above every one that does not.
- Among those that reach it, the direct way scores above detours, repeated calls and needless text.
- Among those that do not, the one that came closer, or that failed more honestly, scores above the other.
- The distance of two scores says how far apart the trajectories are: nearly equal work gets nearly equal scores."""
ABSOLUTE_RUBRIC = """\
- 1 means that the task is done completely and well, 0 that nothing useful came of it.
- What was asked for counts most; then that the way to it was direct.
- Part of the task done well is worth part of the score."""


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
        rubric: str = DEFAULT_RUBRIC,
        extra_litellm_params: Mapping[str, Any] | None = None,
        settings: JudgeSettings | None = None,
        name: str = "ruler",
    ) -> None:
        """
        Args:
            judge_model: a model name in litellm's form (`openai/o3`, `ollama_chat/qwen3:8b`), or an `art.Model`,
                trainable or not.
            rubric: what makes a trajectory good.
            extra_litellm_params: further arguments of each request: `base_url`, `api_key`, `temperature`, ...
            settings: time limits, attempts, passes, prices and budget.
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
            return await self._one_pass(evidence, order)
        passes = await run_together([self._one_pass(evidence, order), self._one_pass(evidence, order[::-1])])
        first, second = ([verdict.score for verdict in judgement.verdicts] for judgement in passes)
        agreement = compare_passes(first, second)
        verdicts = [
            Verdict(
                score=(a.score + b.score) / 2,
                explanation=a.explanation,
                parts={k: (a.parts[k] + b.parts[k]) / 2 for k in a.parts} | {"pass_1": a.score, "pass_2": b.score},
            )
            for a, b in zip(passes[0].verdicts, passes[1].verdicts, strict=True)
        ]
        judgement = self.grader.join(passes, verdicts)
        further = {"judge_disagreement": agreement.disagreement, "judge_reliability": agreement.reliability}
        return replace(judgement, metrics=judgement.metrics | further)

    async def _one_pass(self, evidence: list[Evidence], order: list[int]) -> Judgement:
        try:
            judgement = await self.grader.grade([evidence[i] for i in order])
        except ContextLengthError as error:
            problem = f"the {len(evidence)} trajectories of a group do not fit into the judge's context"
            hint = "choose a judge with a longer context, or make smaller groups"
            raise JudgeError(f"{problem}; {hint}: {error.message}") from error
        by_place = dict(zip(order, judgement.verdicts, strict=True))
        return replace(judgement, verdicts=[by_place[i] for i in range(len(evidence))])


class AbsoluteJudge:
    """A judge model that grades each trajectory by itself, from 0 to 1. One instance can score many groups at once.

    Its scores can be compared between groups, which RULER's cannot. RULER tells the trajectories of one group apart
    more sharply. With a reference answer the judge only has to decide whether a trajectory agrees with it.
    """

    def __init__(
        self,
        judge_model: str | Model[Any, Any],
        *,
        rubric: str = ABSOLUTE_RUBRIC,
        reference: str | Callable[[Trajectory], str] | None = None,
        extra_litellm_params: Mapping[str, Any] | None = None,
        settings: JudgeSettings | None = None,
        name: str = "judge",
    ) -> None:
        """
        Args:
            judge_model: a model name in litellm's form (`openai/o3`, `ollama_chat/qwen3:8b`), or an `art.Model`.
            rubric: what makes a trajectory good.
            reference: where to find the right answer: a key in the metadata of the trajectory or its group, or a
                function of the trajectory.
            extra_litellm_params: further arguments of each request: `base_url`, `api_key`, `temperature`, ...
            settings: time limits, attempts, prices and budget.
            name: name of the judge in metrics: `<name>_score` and `costs/judge/<name>`.
        """
        self.name = name
        self.settings = settings or JudgeSettings()
        if self.settings.passes == 2:
            raise ConfigError("`passes=2` is for comparisons; an absolute judge sees one trajectory at a time")
        self._reference = reference
        self._grader = Grader(
            judge_model, rubric, kind="absolute", params=extra_litellm_params, settings=self.settings, name=name
        )

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        async def grade(evidence: Evidence, reference: str | None) -> Judgement:
            try:
                return await self._grader.grade([evidence], reference)
            except ContextLengthError as error:
                raise JudgeError(f"a trajectory is longer than the judge's context: {error}") from error

        questions = [(evidence_of(trajectory), self._reference_of(trajectory, group)) for trajectory in group]
        distinct = {(evidence.digest, reference): evidence for evidence, reference in questions}
        async with self._grader.deadline(len(group)):
            judgements = await run_together(grade(evidence, key[1]) for key, evidence in distinct.items())
        verdicts = {key: judgement.verdicts[0] for key, judgement in zip(distinct, judgements, strict=True)}
        in_order = [verdicts[evidence.digest, reference] for evidence, reference in questions]
        return self._grader.join(judgements, in_order)

    def _reference_of(self, trajectory: Trajectory, group: TrajectoryGroup) -> str | None:
        if self._reference is None:
            return None
        if callable(self._reference):
            return str(self._reference(trajectory))
        reference = trajectory.metadata.get(self._reference, group.metadata.get(self._reference))
        if reference is None:
            place = f"metadata[{self._reference!r}] of the trajectory or its group"
            raise ConfigError(f"judge {self.name!r} needs a reference answer in {place}; set it in the rollout")
        return str(reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two passes over a group (a judge's scores with the trajectories shown in opposite orders) agree."""

    disagreement: float
    """Root mean square difference of the two scores of a trajectory, each relative to the mean of its pass."""
    single_reliability: float
    """Reliability of one pass, 0 to 1. It is 1 if all scores within each pass are equal."""

    @property
    def reliability(self) -> float:
        """Reliability of the mean of both passes, 0 to 1."""
        return 2 * self.single_reliability / (1 + self.single_reliability)


def compare_passes(first: Sequence[float], second: Sequence[float]) -> Agreement:
    """Measure how far two passes over a group agree, from the scores of its trajectories in each.

    Example: (0, 1) and (0.2, 0.8) differ by 0.2 on each trajectory; reliability of one pass 0.88, of the mean 0.94.
    """
    a, b = ([score - statistics.fmean(scores) for score in scores] for scores in (first, second))
    disagreement = math.sqrt(statistics.fmean((x - y) ** 2 for x, y in zip(a, b, strict=True)))
    spread = sum(x * x for x in a) + sum(y * y for y in b)
    shared = 1.0 if spread < 1e-12 else 2 * sum(x * y for x, y in zip(a, b, strict=True)) / spread
    return Agreement(disagreement=disagreement, single_reliability=max(0.0, shared))


async def ruler(
    message_lists: Sequence[Messages],
    judge_model: str | Model[Any, Any] = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
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
    rubric: str = DEFAULT_RUBRIC,
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
