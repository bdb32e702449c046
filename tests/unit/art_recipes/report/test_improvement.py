"""How often the gate of a promotion passes a checkpoint that is not better: over many simulated pairs of equal models."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from art.metrics.scores import FALSE_PROMOTIONS, MIN_SCENARIOS, measure_improvement, tail_of_look

Draw = Callable[[], dict[str, list[float]]]


def equal_models(rng: random.Random, kind: str, num: int, better_by: float = 0.0) -> tuple[Draw, Draw]:
    """Two models that draw their rewards on the same scenarios; the second is better by a share, or equal."""
    shares = [rng.betavariate(1.5, 1.5) for _ in range(num)]
    levels = [rng.gauss(0, 1) for _ in range(num)]

    def draw(gain: float) -> dict[str, list[float]]:
        if kind == "rewards":
            return {str(i): [level + gain + rng.gauss(0, 1)] for i, level in enumerate(levels)}
        count = 4 if kind == "four rollouts" else 1
        wins = [min(1.0, share + gain) for share in shares]
        return {str(i): [float(rng.random() < share) for _ in range(count)] for i, share in enumerate(wins)}

    return lambda: draw(0.0), lambda: draw(better_by)


def passes(reference: dict[str, list[float]], candidate: dict[str, list[float]], look: int = 1) -> bool:
    score = measure_improvement(reference, candidate, look=look)
    return score is not None and score.low is not None and score.low > 0


def test_all_looks_together_may_err_five_times_in_a_hundred() -> None:
    assert sum(tail_of_look(look) for look in range(1, 100_000)) == pytest.approx(FALSE_PROMOTIONS, rel=1e-4)
    assert tail_of_look(1) == 0.025, "the first look has an ordinary 95 % interval"


@pytest.mark.parametrize("kind", ["wins", "four rollouts", "rewards"])
def test_equal_models_are_not_promoted(kind: str) -> None:
    rng = random.Random(7)
    num_false = 0
    for _ in range(200):
        reference, candidate = equal_models(rng, kind, 30)
        num_false += passes(reference(), candidate())
    assert num_false <= 9, "of 200 pairs; 5 are expected at most"


def test_a_better_model_is_promoted() -> None:
    rng = random.Random(3)
    num_passed = 0
    for _ in range(20):
        reference, candidate = equal_models(rng, "wins", 200, better_by=0.25)
        num_passed += passes(reference(), candidate())
    assert num_passed >= 19


def test_asking_again_and_again_does_not_help() -> None:
    """Twenty candidates, each equal to the reference: a gate with the same interval each time passes one of them."""
    rng = random.Random(11)
    with_looks, without = 0, 0
    for _ in range(60):
        reference, candidate = equal_models(rng, "rewards", MIN_SCENARIOS["t"])
        measured = reference()
        candidates = [candidate() for _ in range(20)]
        with_looks += any(passes(measured, one, look) for look, one in enumerate(candidates, start=1))
        without += any(passes(measured, one) for one in candidates)
    assert with_looks <= 7, "of 60; 3 are expected at most"
    assert without >= 10, "this is what the looks prevent"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wins", "four rollouts", "rewards"])
@pytest.mark.parametrize("num", [10, MIN_SCENARIOS["t"], 50])
def test_false_promotions_over_thousands_of_pairs(kind: str, num: int) -> None:
    """The rate stays below the level of the look, with room for chance (4 standard deviations)."""
    rng = random.Random(num)
    for look, pairs in ((1, 1500), (3, 1500)):
        expected = pairs * tail_of_look(look)
        num_false = 0
        for _ in range(pairs):
            reference, candidate = equal_models(rng, kind, num)
            num_false += passes(reference(), candidate(), look)
        assert num_false <= expected + 4 * expected**0.5


def test_scenarios_without_a_pair_do_not_count() -> None:
    score = measure_improvement({"a": [0.0], "b": [1.0]}, {"b": [1.0], "c": [1.0]}, look=1)
    assert score is not None
    assert score.num == 1
    assert measure_improvement({"a": [0.0]}, {"b": [1.0]}, look=1) is None
