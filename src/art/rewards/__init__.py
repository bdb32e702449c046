"""Rewards: judges that compare or grade trajectories, plain reward functions, and weighted sums of both."""

from art.rewards.absolute import AbsoluteJudge
from art.rewards.asking.grader import Criterion
from art.rewards.combine import as_judge, combine
from art.rewards.judge import Judge, Judgement, Verdict
from art.rewards.outcomes import GroupScorer, score_group
from art.rewards.ruler import DEFAULT_RUBRIC, Ruler, TrajectoryScore, ruler, ruler_score_group
from art.rewards.settings import Budget, JudgeSettings, params_at

__all__ = [
    "DEFAULT_RUBRIC",
    "AbsoluteJudge",
    "Budget",
    "Criterion",
    "GroupScorer",
    "Judge",
    "JudgeSettings",
    "Judgement",
    "Ruler",
    "TrajectoryScore",
    "Verdict",
    "as_judge",
    "combine",
    "params_at",
    "ruler",
    "ruler_score_group",
    "score_group",
]
