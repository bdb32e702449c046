"""Rewards: judges that compare or grade trajectories, plain reward functions, and weighted sums of both."""

from art.rewards.judge import Budget, Judge, Judgement, JudgeSettings, Verdict, params_at
from art.rewards.outcomes import GroupScorer, as_judge, combine, score_group
from art.rewards.ruler import DEFAULT_RUBRIC, AbsoluteJudge, Ruler, TrajectoryScore, ruler, ruler_score_group

__all__ = [
    "DEFAULT_RUBRIC",
    "AbsoluteJudge",
    "Budget",
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
