"""A judge that grades each trajectory by itself, with or without a reference answer.

Its scores can be compared between groups, which RULER's cannot. RULER tells the trajectories of one group apart more
sharply. With a reference answer the judge only has to decide whether the trajectory agrees with it, which is easier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from art.errors import ConfigError, ContextLengthError, JudgeError
from art.model import Model
from art.rewards.asking.evidence import Evidence, evidence_of
from art.rewards.asking.grader import Grader, Rubric, run_together
from art.rewards.judge import Judgement
from art.rewards.settings import JudgeSettings
from art.trajectory import Trajectory, TrajectoryGroup

ABSOLUTE_RUBRIC = """\
- 1 means that the task is done completely and well, 0 that nothing useful came of it.
- What was asked for counts most; then that the way to it was direct.
- Part of the task done well is worth part of the score."""

Reference = str | Callable[[Trajectory], str]


class AbsoluteJudge:
    """A judge model that grades each trajectory by itself, from 0 to 1. One instance can score many groups at once."""

    def __init__(
        self,
        judge_model: str | Model[Any, Any],
        *,
        rubric: Rubric = ABSOLUTE_RUBRIC,
        reference: Reference | None = None,
        extra_litellm_params: Mapping[str, Any] | None = None,
        settings: JudgeSettings | None = None,
        name: str = "judge",
    ) -> None:
        """
        Args:
            judge_model: a model name in litellm's form (`openai/o3`, `ollama_chat/qwen3:8b`), or an `art.Model`.
            rubric: what makes a trajectory good, in prose or as criteria.
            reference: where to find the right answer: a key in the metadata of the trajectory or its group, or a
                function of the trajectory.
            extra_litellm_params: further arguments of each request: `base_url`, `api_key`, `temperature`, ...
            settings: time limits, attempts, prices, budget and cache.
            name: name of the judge in metrics: `<name>_score` and `costs/judge/<name>`.
        """
        self.name = name
        self.settings = settings or JudgeSettings()
        if self.settings.passes == 2:
            raise ConfigError(
                "`passes=2` shows a group in two orders, but an absolute judge sees one trajectory at a time; use "
                "`passes=1`"
            )
        self._reference = reference
        self._grader = Grader(
            judge_model, rubric, kind="absolute", params=extra_litellm_params, settings=self.settings, name=name
        )

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        questions = [(evidence_of(trajectory), self._reference_of(trajectory, group)) for trajectory in group]
        distinct = {(evidence.digest, reference): evidence for evidence, reference in questions}
        async with self._grader.deadline(len(group)):
            judgements = await run_together(
                self._grade(evidence, reference) for (_, reference), evidence in distinct.items()
            )
        verdicts = {key: judgement.verdicts[0] for key, judgement in zip(distinct, judgements, strict=True)}
        in_order = [verdicts[evidence.digest, reference] for evidence, reference in questions]
        return self._grader.join(judgements, in_order)

    async def _grade(self, evidence: Evidence, reference: str | None) -> Judgement:
        try:
            return await self._grader.grade_cached(
                [evidence], ["reference", reference], lambda: self._grader.grade([evidence], reference)
            )
        except ContextLengthError as error:
            raise JudgeError(f"a trajectory is longer than the judge's context: {error}") from error

    def _reference_of(self, trajectory: Trajectory, group: TrajectoryGroup) -> str | None:
        if self._reference is None:
            return None
        if callable(self._reference):
            return str(self._reference(trajectory))
        reference = trajectory.metadata.get(self._reference, group.metadata.get(self._reference))
        if reference is None:
            raise ConfigError(
                f"judge {self.name!r} needs a reference answer in metadata[{self._reference!r}] of the trajectory or "
                "its group; set it in the rollout"
            )
        return str(reference)
