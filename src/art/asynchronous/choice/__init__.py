"""Groups that teach: which scenario comes next, when a group ends early, and what a useful group costs.

A group is *useful* if its rewards have spread: otherwise all advantages are 0, and its rollouts taught nothing.

spread       whether rewards have spread, and the chance that the next group of a scenario has
curriculum   `Curriculum`: chooses scenarios by that chance
early_stop   ends a group whose first rollouts all earned the same
useful       counts useful groups and what they cost
"""

from art.asynchronous.choice.curriculum import Choice, Curriculum
from art.asynchronous.choice.early_stop import stops_early
from art.asynchronous.choice.spread import has_spread, spread_chance
from art.asynchronous.choice.useful import GroupUse, UsefulGroups

__all__ = ["Choice", "Curriculum", "GroupUse", "UsefulGroups", "has_spread", "spread_chance", "stops_early"]
