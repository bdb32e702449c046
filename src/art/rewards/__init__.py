"""Rewards: judges that compare or grade trajectories, plain functions, and sums of them."""

from art.rewards.grader import Criterion
from art.rewards.judge import Judge, Judgement, Verdict
from art.rewards.outcomes import GroupScorer, score_group
from art.rewards.ruler import DEFAULT_RUBRIC, Ruler, TrajectoryScore, ruler, ruler_score_group
from art.rewards.settings import Budget, JudgeSettings

__all__ = [
    "DEFAULT_RUBRIC",
    "Budget",
    "Criterion",
    "GroupScorer",
    "Judge",
    "JudgeSettings",
    "Judgement",
    "Ruler",
    "TrajectoryScore",
    "Verdict",
    "ruler",
    "ruler_score_group",
    "score_group",
]
