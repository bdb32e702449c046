"""How often the verdicts of ART are wrong by chance: policies that are equal, or not better, are compared many times.

    python -m benchmarks verdicts
    python -m benchmarks verdicts --quick       few comparisons: whether it works

No model runs. Rewards of two policies on the same scenarios are drawn, and the functions that ART calls decide.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from art.metrics.scores import (
    MIN_SCENARIOS,
    Estimate,
    estimate_change,
    mean_with_interval,
    measure_improvement,
)
from benchmarks.report import Cell, Result

Side = list[list[float]]
"""Values of the rollouts of each scenario."""
Policy = Callable[[], Side]
"""Rolls out the same scenarios again."""
Draw = Callable[[np.random.Generator, int], list[float]]
"""Draws this many values."""
NUMBERS = (4, 10, 30, 100, 400)
SHARES = (0.003, 0.01, 0.05, 0.2, 0.5, 0.9, 0.99)
MOST_LOOKS = 20


@dataclass(frozen=True, slots=True)
class World:
    """Scenarios with two policies, the second of which is not better."""

    name: str
    policies: Callable[[np.random.Generator, int], tuple[Policy, Policy]]
    """Draws this many scenarios, and returns both policies on them."""
    gain: float = 0.0
    """True mean of the second policy minus that of the first."""


def wins(share: float | None, rollouts: int = 1) -> World:
    """A world of rewards 0 and 1, won with the same share in all scenarios, or with any from 0 to 1 if it is `None`."""

    def policies(rng: np.random.Generator, num: int) -> tuple[Policy, Policy]:
        shares = rng.beta(0.7, 0.7, (num, 1)) if share is None else np.full((num, 1), share)
        policy = lambda: (rng.random((num, rollouts)) < shares).astype(float).tolist()  # noqa: E731
        return policy, policy

    of_each = "" if rollouts == 1 else f", {rollouts} rollouts of each scenario"
    return World(f"0 or 1, {'mixed scenarios' if share is None else f'true share {share}'}{of_each}", policies)


def _continuous(rng: np.random.Generator, num: int) -> tuple[Policy, Policy]:
    levels = rng.normal(size=(num, 1))
    policy = lambda: (levels + rng.normal(size=(num, 1))).tolist()  # noqa: E731
    return policy, policy


def _degrees(rng: np.random.Generator, num: int) -> tuple[Policy, Policy]:
    policy = lambda: rng.choice([0.0, 0.0, 0.0, 0.25, 1.0], (num, 1)).tolist()  # noqa: E731
    return policy, policy


def _rarely_much_worse(rng: np.random.Generator, num: int) -> tuple[Policy, Policy]:
    lost = rng.random((num, 1)) < 0.06
    return lambda: [[0.0]] * num, lambda: np.where(lost, -1.0, 0.05).tolist()


MIXED, FOUR, DEGREES, CONTINUOUS = (
    wins(None), wins(None, 4), World("degrees, most of them 0", _degrees), World("normal, levels differ", _continuous)
)  # fmt: skip
WORSE = World("worse by 0.013: +0.05 in 94 % of the scenarios, -1 in 6 %", _rarely_much_worse, 0.94 * 0.05 - 0.06)
WORLDS = (*map(wins, SHARES), MIXED, FOUR, DEGREES, CONTINUOUS, WORSE)


def _draw_wins(share: float, rng: np.random.Generator, num: int) -> list[float]:
    return list(map(float, rng.random(num) < share))


MEANS: tuple[tuple[str, Draw, float], ...] = (
    ("normal", lambda rng, num: rng.normal(size=num).tolist(), 0.0),
    ("exponential", lambda rng, num: rng.exponential(size=num).tolist(), 1.0),
    *((wins(share).name, partial(_draw_wins, share), share) for share in SHARES),
)
"""Values with their true mean."""


def change(before: Side, after: Side, *, paired: bool = True) -> Estimate:
    """Estimate the change as `art train --held-out` does, or as if the scenarios of the two sides were not known."""
    first, second = (
        [(place if paired else None, value) for place, own in enumerate(side) for value in own]
        for side in (before, after)
    )
    return estimate_change(first, second)


def is_promoted(before: Side, after: Side, look: int) -> bool:
    reference, candidate = ({str(i): own for i, own in enumerate(side)} for side in (before, after))
    score = measure_improvement(reference, candidate, look=look)
    assert score is not None
    return score.num >= MIN_SCENARIOS[score.method] and score.low is not None and score.low > 0


def mistakes(world: World, repeats: int, paired: bool, num: int) -> str:
    """Return the percentages of comparisons that call the second policy better, and worse, by mistake."""
    rng, better, worse = np.random.default_rng(num), 0, 0
    for _ in range(repeats):
        first, second = world.policies(rng, num)
        found = change(first(), (second if paired else world.policies(rng, num)[1])(), paired=paired)
        better += found.low > 0
        worse += found.high < 0
    return _percent(better, repeats) + (f" / {_percent(worse, repeats)}" if world.gain == 0 else "")


def promotions(world: World, repeats: int, looks: int, num: int, *, gate: bool = True) -> str:
    """Return the percentage of runs in which one of `looks` candidates that are not better is promoted.

    Args:
        gate: whether `model.promote(require=0)` decides; else `if change.low > 0` does.
    """
    rng, passed = np.random.default_rng(num), 0
    for _ in range(repeats):
        first, second = world.policies(rng, num)
        before = first()
        passed += any(
            is_promoted(before, second(), look) if gate else change(before, second()).low > 0
            for look in range(1, looks + 1)
        )
    return _percent(passed, repeats)


def held(draw: Draw, mean: float, repeats: int, num: int) -> str:
    """Return the percentage of 95 % intervals of a mean that contain it."""
    rng, inside = np.random.default_rng(num), 0
    for _ in range(repeats):
        low, high = mean_with_interval(draw(rng, num))[1]
        inside += low <= mean <= high
    return _percent(inside, repeats)


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--comparisons", type=int, help="comparisons for each figure (default: 600)")


def run(args: argparse.Namespace) -> Result:
    repeats = args.comparisons or (20 if args.quick else 600)
    few = max(repeats // 5, 1)

    others = (*map(wins, SHARES), DEGREES, CONTINUOUS)
    rows = [
        _row("better / worse, same scenarios", world.name, partial(mistakes, world, repeats, True)) for world in WORLDS
    ]
    rows += [
        _row("better / worse, other scenarios", world.name, partial(mistakes, world, repeats, False))
        for world in others
    ]
    for world in (wins(0.01), wins(0.5), MIXED, FOUR, CONTINUOUS, WORSE):
        rows += [
            _row("promoted by the gate, 1 look", world.name, partial(promotions, world, repeats, 1)),
            _row(f"promoted by the gate, {MOST_LOOKS} looks", world.name, partial(promotions, world, few, MOST_LOOKS)),
        ]
    rows += [
        _row(
            f"`change.low > 0` at one of {looks} evaluations", MIXED.name,
            partial(promotions, MIXED, few, looks, gate=False),
        )
        for looks in (5, MOST_LOOKS)
    ]  # fmt: skip
    rows += [
        _row("95 % interval of a mean holds it", name, partial(held, draw, mean, repeats)) for name, draw, mean in MEANS
    ]
    return Result(
        summary=f"Policies that are equal, or not better, compared {repeats:,} times ({few:,} runs of several looks).",
        rows=rows,
        notes=[
            "percent of the comparisons with a wrong verdict: 2.5 / 2.5 are what a 95 % interval allows, 2.5 one look "
            "of the gate, 5 all looks together. The last rows should be 95",
            "same scenarios: art train and demo, reports of mcp-rl and auto, art compare, a pipeline's `change`, and "
            "the page",
            "other scenarios: the same where the two evaluations have no scenario in common",
        ],
    )


def _row(verdict: str, values: str, cell: Callable[[int], str]) -> dict[str, Cell]:
    return {"verdict": verdict, "values": values, **{f"n = {num}": cell(num) for num in NUMBERS}}


def _percent(count: int, of: int) -> str:
    return f"{100 * count / of:.1f}"
