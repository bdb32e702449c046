"""`Curriculum`: chooses the scenarios whose next group probably has spread, and forgets none.

    position p of the stream      is it a turn? (a share `FLOOR` of the positions, evenly spaced)
        yes                       the scenario that was not chosen for the longest time
        no                        a draw with weights w = (chance that the next group of the scenario has spread)^3

Each group of a scenario that is under way divides its weight by 4, and a turn goes to a scenario without one, so that a
step has many different scenarios. A scenario is trained again in the same step only where the others teach far less. So

- every scenario is chosen at least once in `num_scenarios / FLOOR` positions, those that it runs in not counted. That
  is `FLOOR` of its share without a curriculum. Prioritized Level Replay mixes its scores with the time since a level
  was last played in the same way (arXiv 2010.03934);
- scenarios that were always solved, or never, come back by their turns: in groups of 8 their chance is estimated as
  0.15 after some groups, which is a weight of 0.003, where one that is solved half of the time has 0.75 and one that
  was never run 0.22.

With the chance itself as weight, many dull scenarios together outweigh a few that teach;
`benchmarks/teaching.py` measures 1.6, 2.1, 2.4 and 2.5 times fewer rollouts per useful group with the powers 1 to 4.
Related: prime-rl gives pools of easy and hard scenarios a weight of 0.2; MoPPS (arXiv 2507.04632) and SPEED (arXiv
2506.09016) prefer pass rates near 0.5. Here the weight is flat over the middle: a group with spread teaches at a pass
rate of 0.2 too, and one lucky group does not decide.

It changes what is trained: the mean over scenarios that the policy improves is no longer the mean over the list. What
was always solved gets less training, and can be unlearnt until its turn comes; held-out evaluations show that.

The choice at a position depends on the seed, the position and the reports so far, not on a state of random numbers.

Let q be the chance that a further rollout of a group earns the same as its first one. A group of n has no spread if all
n - 1 others do, so

    chance of spread = 1 - E[q^(n-1)]

q is estimated from the groups of the scenario: in each, the rollouts with its most frequent reward count as `same`, the
rest as `other`. With the prior Beta(3/2, 1/2) and the counts S and O,

    E[q^(n-1)] = product over i < n-1 of (3/2 + S + i) / (2 + S + O + i)

- Rewards need not be 0 and 1, nor be comparable between scenarios. A scenario whose rollouts all earn 0.5 has no
  spread, and one whose rewards are all different always has.
- For rewards of 0 and 1 this is the pass rate p in other words: the chance is close to 1 - p^n - (1-p)^n, which is 0 at
  p = 0 and p = 1 and flat in between. The prior is Jeffreys' Beta(1/2, 1/2) for p, of which the first rollout is known.
  It gives a scenario that was never run a chance of 61 % in groups of 8; in agent training about 60 % of the groups
  have spread (arXiv 2605.05802).
- After six groups of 8 the estimate is within 0.13 of the truth on average, and 0.16 where the truth is 0: a few groups
  never prove that a scenario is solved always.
- The policy moves, so each new group halves the weight of the older ones, as MoPPS does (arXiv 2507.04632, decay 0.5).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from art.client.rollout_context import derive_seed
from art.config.training import SPREAD_TOLERANCE
from art.errors import ConfigError

FLOOR = 0.1
"""Share of the groups that go to the scenario that waited the longest, whatever it is worth. It is the share that
Prioritized Level Replay gives to the time since a level was last played (arXiv 2010.03934)."""
SHARPNESS = 3
"""Power of the chance of spread in the weight of a scenario."""
BESIDES = 0.25
"""Factor of the weight of a scenario for each of its groups under way."""
FORGETTING = 0.5
"""Weight of the groups before, when a new one is counted."""
_PRIOR_SAME, _PRIOR_OTHER = 1.5, 0.5
_DIGITS = 4
"""Decimals that are kept, in memory as on disk: a resumed estimate is the same."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ by enough to learn from: the trainer's criterion, for rewards of one kind."""
    if not rewards or min(rewards) == max(rewards):
        return False
    mean = math.fsum(rewards) / len(rewards)
    return max(max(rewards) - mean, mean - min(rewards)) > SPREAD_TOLERANCE


def spread_chance(same: float, other: float, num_rollouts: int) -> float:
    """Return the chance that a group of `num_rollouts` has spread.

    Args:
        same: weight of the rollouts that earned the most frequent reward of their group.
        other: weight of the others.
    """
    without = 1.0
    for i in range(num_rollouts - 1):
        without *= (_PRIOR_SAME + same + i) / (_PRIOR_SAME + _PRIOR_OTHER + same + other + i)
    return 1.0 - without


@dataclass(frozen=True, slots=True)
class SpreadEstimate:
    """What the groups of one scenario have shown so far."""

    num_groups: int = 0
    same: float = 0.0
    other: float = 0.0
    mean_reward: float = 0.0
    """Mean reward, with the weights of the groups."""

    def chance(self, num_rollouts: int) -> float:
        """Return the chance that the next group, of `num_rollouts`, has spread."""
        return spread_chance(self.same, self.other, num_rollouts)

    def after(self, rewards: Sequence[float]) -> SpreadEstimate:
        """Return the estimate after a further group. Fewer than two rewards tell nothing and change nothing."""
        if len(rewards) < 2:
            return self
        same = max(Counter(round(reward, 6) for reward in rewards).values())
        weight = FORGETTING * (self.same + self.other)
        total = weight + len(rewards)
        return SpreadEstimate(
            num_groups=self.num_groups + 1,
            same=round(FORGETTING * self.same + same, _DIGITS),
            other=round(FORGETTING * self.other + len(rewards) - same, _DIGITS),
            mean_reward=round((weight * self.mean_reward + math.fsum(rewards)) / total, _DIGITS),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen scenario."""

    index: int
    """Index in the list of scenarios."""
    reason: dict[str, float | str] = field(default_factory=dict)
    """Why it was chosen, as names and numbers that go into the group's plan."""


class Curriculum:
    """Chooses scenarios of a list. Call `next` and `report` once for each group."""

    def __init__(self, num_scenarios: int, *, seed: int, num_rollouts: int) -> None:
        """
        Args:
            seed: seed of the draws.
            num_rollouts: rollouts per group.
        """
        if num_scenarios < 1 or num_rollouts < 2:
            raise ConfigError(
                "a curriculum needs at least one scenario and groups of at least 2 rollouts; got "
                f"{num_scenarios} and {num_rollouts}",
                param="curriculum",
            )
        self._num_scenarios, self._num_rollouts = num_scenarios, num_rollouts
        self._seed = seed
        self._clear()

    def _clear(self) -> None:
        self._estimates = [SpreadEstimate()] * self._num_scenarios
        self._weights = [self._weight(SpreadEstimate())] * self._num_scenarios
        self._last: dict[int, int] = {}
        """Position at which each scenario was last chosen, of those that were."""
        order = list(range(self._num_scenarios))
        random.Random(derive_seed("curriculum", self._seed)).shuffle(order)
        self._order = dict.fromkeys(order)
        """All scenarios; the one that was not chosen for the longest time is first."""
        self._running: Counter[int] = Counter()
        """Number of groups under way of each scenario that has any."""
        self._low, self._high = float("inf"), float("-inf")
        self._chosen: list[_Chosen] = []

    def next(self, position: int) -> Choice:
        """Choose the scenario of the group at `position` of the stream."""
        by_turn = int((position + 1) * FLOOR) > int(position * FLOOR)
        index = self._by_turn() if by_turn else self._draw(position)
        waited = position - self._last.get(index, -1)
        chance, rate = self._estimates[index].chance(self._num_rollouts), self._pass_rate(index)
        self._chosen.append(_Chosen(by_turn, index not in self._last, chance, rate, waited))
        self.resume(position, index)
        reason: dict[str, float | str] = {
            "chosen_by": "turn" if by_turn else "chance of spread",
            "spread_chance": round(chance, 3),
            "groups_before": self._estimates[index].num_groups,
            "positions_waited": waited,
        }
        return Choice(index, reason if rate is None else reason | {"pass_rate": round(rate, 3)})

    def resume(self, position: int, index: int) -> None:
        """Note that scenario `index` has the group at `position`: an earlier run has chosen it, and it is under way.

        Raises:
            ConfigError: the list has no such scenario.
        """
        if not 0 <= index < self._num_scenarios:
            raise ConfigError(_shorter_list(index, self._num_scenarios), param="scenarios")
        self._running[index] += 1
        if position > self._last.get(index, -1):
            self._last[index] = position
            self._order[index] = self._order.pop(index)

    def report(self, index: int, rewards: Sequence[float]) -> None:
        """Take the rewards of a group of scenario `index`, which is no longer under way; none if it was lost."""
        self._running[index] -= 1
        if self._running[index] <= 0:
            del self._running[index]
        self._estimates[index] = self._estimates[index].after(rewards)
        self._weights[index] = self._weight(self._estimates[index])
        self._low, self._high = min([self._low, *rewards]), max([self._high, *rewards])

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON: about 40 bytes for each scenario that was chosen.

        Groups under way are not part of it: tell the restored curriculum of each by `resume`.
        """
        rows = []
        for index, position in sorted(self._last.items(), key=lambda item: item[1]):
            one = self._estimates[index]
            rows.append([index, position, one.num_groups, one.same, one.other, one.mean_reward])
        return {"reward_range": [self._low, self._high] if self._low <= self._high else [], "scenarios": rows}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`, and forget everything else. The list of scenarios may have become longer.

        Raises:
            ConfigError: the list has become shorter.
        """
        self._clear()
        for index, position, *numbers in state.get("scenarios", []):
            if index >= self._num_scenarios:
                raise ConfigError(_shorter_list(index, self._num_scenarios), param="scenarios")
            self._estimates[index] = SpreadEstimate(*numbers)
            self._weights[index] = self._weight(self._estimates[index])
            self._last[index] = position
            self._order[index] = self._order.pop(index)
        if state.get("reward_range"):
            self._low, self._high = state["reward_range"]

    def metrics(self) -> dict[str, float]:
        """Return what was chosen since the last call, and why, as `pipeline/choice_...`."""
        chosen, self._chosen = self._chosen, []
        seen_share = len(self._last) / self._num_scenarios
        if not chosen:
            return {"pipeline/choice_seen_share": seen_share}
        rates = [one.pass_rate for one in chosen if one.pass_rate is not None]
        numbers = {
            "seen_share": seen_share,
            "spread_chance": _mean([one.chance for one in chosen]),
            "by_turn_share": _mean([one.by_turn for one in chosen]),
            "new_share": _mean([one.is_new for one in chosen]),
            "waited_max": max(one.waited for one in chosen),
        } | ({"pass_rate": _mean(rates)} if rates else {})
        return {f"pipeline/choice_{name}": float(value) for name, value in numbers.items()}

    def _by_turn(self) -> int:
        """Find the scenario that waited the longest, of those without a group under way if there are any."""
        return next((index for index in self._order if not self._running[index]), next(iter(self._order)))

    def _draw(self, position: int) -> int:
        """Draw a scenario by the weights."""
        weights = self._weights.copy()
        for index, count in self._running.items():
            weights[index] *= BESIDES**count
        sums = list(accumulate(weights))
        place = random.Random(derive_seed("choice", self._seed, position)).random() * sums[-1]
        return bisect_right(sums, place, hi=len(sums) - 1)

    def _weight(self, estimate: SpreadEstimate) -> float:
        chance: float = estimate.chance(self._num_rollouts)
        return chance**SHARPNESS

    def _pass_rate(self, index: int) -> float | None:
        """Mean reward of a scenario in the range of all rewards seen; `None` while that is unknown."""
        if not self._estimates[index].num_groups or self._low >= self._high:
            return None
        return (self._estimates[index].mean_reward - self._low) / (self._high - self._low)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is counted of a choice."""

    by_turn: bool
    is_new: bool
    chance: float
    pass_rate: float | None
    waited: int


def _shorter_list(index: int, num_scenarios: int) -> str:
    return (
        f"the curriculum has chosen scenario {index} before, and the list has only {num_scenarios} scenarios now; pass "
        "the list of the earlier run (it may be longer, at its end), or give the model another name to start afresh"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
