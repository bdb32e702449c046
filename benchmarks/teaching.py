"""What does a curriculum bring, in rollouts per group with spread?

Scenarios with known pass rates are run through the pipeline's own pace and curriculum, without a model or a clock:
a rollout earns 1 with the pass rate of its scenario, else 0. Groups of 8, 16 groups per step, staleness 1, 100
steps. A group is useful if its rewards have spread. `against plain` is the ratio of rollouts per useful group, seed by
seed: 2 means that a useful group costs half as many rollouts.

    python -m benchmarks teaching --json teaching.json
    python -m benchmarks teaching --quick
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from art.asynchronous.curriculum import Curriculum, has_spread
from art.asynchronous.pace import Pace
from art.config.pipeline import PipelineConfig
from benchmarks.report import Cell, Result, Spread

Rates = list[float]
STEPS = 100
ARMS: dict[str, PipelineConfig] = {
    "plain": PipelineConfig(),
    "curriculum": PipelineConfig(curriculum=True),
}


@dataclass(frozen=True, slots=True)
class Population:
    """Scenarios, and how their pass rates change in the middle of the run."""

    name: str
    make: Callable[[random.Random], Rates]
    change: Callable[[Rates, random.Random], Rates] = field(default=lambda rates, rng: rates)


def _mixed(rng: random.Random, num: int = 200) -> Rates:
    kinds = (lambda: 0.0, lambda: 0.0, lambda: 0.0, lambda: 1.0, lambda: 1.0, lambda: 1.0, *[rng.random] * 4)
    return [rng.choice(kinds)() for _ in range(num)]


def _hard(rng: random.Random) -> Rates:
    return [rng.uniform(0, 0.02) if rng.random() < 0.8 else rng.uniform(0.1, 0.6) for _ in range(200)]


def _learnt(rates: Rates, rng: random.Random) -> Rates:
    """Half of what was solved sometimes is solved always; a quarter of what was never solved is solved sometimes."""
    changed = []
    for rate in rates:
        if 0.1 < rate < 1 and rng.random() < 0.5:
            rate = 1.0
        elif rate == 0 and rng.random() < 0.25:
            rate = rng.uniform(0.2, 0.8)
        changed.append(rate)
    return changed


POPULATIONS = [
    Population("30 % never, 30 % always, 40 % sometimes solved", _mixed),
    Population("80 % hardly ever solved (below 2 %), 20 % sometimes", _hard),
    Population("all solved sometimes (20 to 80 %)", lambda rng: [rng.uniform(0.2, 0.8) for _ in range(200)]),
    Population("the first, and at half time the policy has learnt", _mixed, _learnt),
    Population("the first with 2,000 scenarios: each comes up once at most", lambda rng: _mixed(rng, 2000)),
]


@dataclass(slots=True)
class Outcome:
    """Sums over one run."""

    num_groups: int = 0
    num_useful: int = 0
    longest_gap: int = 0
    """Most groups between two groups of a scenario, of those that were chosen again."""

    def share(self) -> float:
        return self.num_useful / self.num_groups


class Simulation:
    """One run: the real pace and curriculum over scenarios with known pass rates."""

    def __init__(self, config: PipelineConfig, population: Population, seed: int, num_steps: int) -> None:
        self.config, self.population, self.num_steps = config, population, num_steps
        self.rng = random.Random(seed)
        self.rates = population.make(self.rng)
        self.pace = Pace(
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            last_step=num_steps,
        )
        self.curriculum = Curriculum(len(self.rates), seed=seed, num_rollouts=config.rollouts_per_group)
        self.order: list[int] = []
        self.last: dict[int, int] = {}
        self.outcome = Outcome()
        self.groups: dict[int, tuple[int, list[float]]] = {}
        """Scenario and rewards of each group that was not trained yet."""

    def run(self) -> Outcome:
        for step in range(self.num_steps):
            if step == self.num_steps // 2:
                self.rates = self.population.change(self.rates, self.rng)
            while (numbers := self.pace.next_step()) is None:
                self._start_groups()
                self.pace.finish(self.pace.running[0])
            self.pace.begin(numbers)
            for number in sorted(numbers):
                self._train(number)
            self.pace.publish(step + 1)
        return self.outcome

    def _start_groups(self) -> None:
        while self.pace.may_start():
            number = self.pace.start()
            index = self.curriculum.next(number).index if self.config.curriculum else self._in_passes(number)
            self.outcome.longest_gap = max(self.outcome.longest_gap, number - self.last.get(index, number))
            self.last[index] = number
            self.groups[number] = index, self._rollouts(self.rates[index])

    def _in_passes(self, number: int) -> int:
        if number % len(self.rates) == 0:
            self.order = list(range(len(self.rates)))
            self.rng.shuffle(self.order)
        return self.order[number % len(self.rates)]

    def _rollouts(self, rate: float) -> list[float]:
        return [float(self.rng.random() < rate) for _ in range(self.config.rollouts_per_group)]

    def _train(self, number: int) -> None:
        index, rewards = self.groups.pop(number)
        self.curriculum.report(index, rewards)
        self.outcome.num_groups += 1
        self.outcome.num_useful += has_spread(rewards)


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seeds", type=int, help="runs of each setting (default: 10, with --quick 2)")


def run(args: argparse.Namespace) -> Result:
    seeds = range(args.seeds or (2 if args.quick else 10))
    num_steps = 10 if args.quick else STEPS
    rows: list[dict[str, Cell]] = []
    for population in POPULATIONS:
        plain: list[float] = []
        for arm, config in ARMS.items():
            outcomes = [Simulation(config, population, seed, num_steps).run() for seed in seeds]
            costs = [config.rollouts_per_group / outcome.share() for outcome in outcomes]
            plain = plain or costs
            rows.append(
                {
                    "scenarios": population.name,
                    "settings": arm,
                    "useful groups, of all": Spread.of([outcome.share() for outcome in outcomes]),
                    "useful groups per step": Spread.of([o.num_useful / num_steps for o in outcomes]),
                    "rollouts per useful group": Spread.of(costs),
                    "against plain": Spread.of([before / cost for before, cost in zip(plain, costs, strict=True)]),
                    "longest gap, in groups": max(outcome.longest_gap for outcome in outcomes),
                }
            )
    return Result(
        summary=f"{len(seeds)} seeds, {num_steps} steps of 16 groups of 8 rollouts; median (lowest to highest).",
        rows=rows,
        notes=[
            "The pass rates are given. Whether a policy learns faster is another question.",
        ],
    )
