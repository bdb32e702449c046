"""What is left of a judge's scores for training: one pass, two passes, and what two passes do when they disagree.

    python -m benchmarks judge_passes
    python -m benchmarks judge_passes --quick       few groups: whether it works

No model is trained. A scripted judge of a chosen reliability scores groups whose true scores are known, and the
advantages from its scores are compared with the true ones.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from art.rewards.ruler import compare_passes
from art.testing.judge import ScriptedJudge
from benchmarks.judging.reliability import find_noise, set_noise
from benchmarks.report import Cell, Result

Group = list[tuple[str, float]]
"""The answers of a group with their true scores. Equal answers are shown to the judge once."""
RELIABILITIES = (0.5, 0.7, 0.8, 0.95)
SIZES = (4, 8)
OPTIONS = ("one pass", "report", "shrink", "set_aside")
"""`report` is what `JudgeSettings(passes=2)` does. The last two were options of it, and taught less."""
MAX_DISAGREEMENT = 0.25
"""Root mean square difference of two passes above which `set_aside` leaves a group out."""


def _one_of_three_words(index: int, rng: random.Random) -> tuple[str, float]:
    return rng.choice([("no", 0.5), ("yes", 0.75), ("maybe", 1.0)])


def _won_or_lost(index: int, rng: random.Random) -> tuple[str, float]:
    return f"game {index}", float(rng.random() < 0.5)


def _degrees(index: int, rng: random.Random) -> tuple[str, float]:
    return f"text {index}", min(max(rng.gauss(0.5, 0.2), 0.0), 1.0)


KINDS: dict[str, Callable[[int, random.Random], tuple[str, float]]] = {
    "one of three words": _one_of_three_words,
    "won or lost": _won_or_lost,
    "degrees": _degrees,
}
"""What answers are like, as functions that draw one."""


@dataclass(slots=True)
class Advantages:
    """Sums over the advantages of many groups, beside the true ones."""

    product: float = 0.0
    judged_square: float = 0.0
    true_square: float = 0.0

    def add(self, judged: Sequence[float], true: Sequence[float]) -> None:
        judged, true = _centred(judged), _centred(true)
        self.product += sum(a * b for a, b in zip(judged, true, strict=True))
        self.judged_square += sum(a * a for a in judged)
        self.true_square += sum(b * b for b in true)

    @property
    def signal(self) -> float:
        """Squared correlation with the true advantages: the share of groups that, judged rightly, teach as much."""
        return self.product**2 / (self.judged_square * self.true_square) if self.product else 0.0

    @property
    def size(self) -> float:
        """Length of the mean update along the right one, over the length of the right one."""
        return self.product / self.true_square


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--judged-groups", type=int, help="groups for each row (default: 800)")


def run(args: argparse.Namespace) -> Result:
    count = args.judged_groups or (40 if args.quick else 800)
    rows = []
    for kind, size, reliability in itertools.product(KINDS, SIZES, RELIABILITIES):
        groups = draw_groups(kind, size, count)
        rows.append(_row(kind, size, reliability, measure(groups, _noise_for(groups, reliability))))
    return Result(
        summary="What judges of known reliability leave of the true advantages: signal / size.",
        rows=rows,
        notes=[
            "signal: squared correlation with the true advantages. Updates from n groups are as precise as from "
            "signal x n groups that are judged rightly",
            "size: length of the mean update along the right one, over that of the right one",
            "the judge errs by normal noise and favours the first place by as much; set_aside: above 0.25",
        ],
    )


def draw_groups(kind: str, size: int, count: int) -> list[Group]:
    """Draw groups whose answers are not all equal."""
    rng, groups = random.Random(1), list[Group]()
    while len(groups) < count:
        group = [KINDS[kind](index, rng) for index in range(size)]
        if len({score for _, score in group}) > 1:
            groups.append(group)
    return groups


def _noise_for(groups: Sequence[Group], reliability: float) -> float:
    judge = ScriptedJudge(lambda trajectory: 0.0)
    return find_noise(judge, [[score for _, score in group] for group in groups[:64]], reliability)


def measure(groups: Sequence[Group], noise: float) -> dict[str, Advantages]:
    """Judge all groups, and compare the advantages by each option of `OPTIONS` with the true ones.

    Args:
        noise: standard deviation of a score's error, and bonus of the first place.
    """
    judge, rng = ScriptedJudge(lambda trajectory: 0.0), random.Random(2)
    set_noise(judge, noise)
    sums = {option: Advantages() for option in OPTIONS}
    for group in groups:
        for option, scores in _judged(judge, dict(group), rng).items():
            sums[option].add([scores[answer] for answer, _ in group], [score for _, score in group])
    return sums


def _judged(judge: ScriptedJudge, true: dict[str, float], rng: random.Random) -> dict[str, dict[str, float]]:
    """Scores of distinct answers by option, as `Ruler` makes them from two passes in opposite orders."""
    order = rng.sample(list(true), len(true))
    first, second = (
        {answer: judge.misjudge(true[answer], place, len(true), rng) for place, answer in enumerate(shown)}
        for shown in (order, order[::-1])
    )
    agreement = compare_passes([first[answer] for answer in order], [second[answer] for answer in order])
    mean = [(first[answer] + second[answer]) / 2 for answer in order]
    centre = statistics.fmean(mean)
    shrunk = [centre + agreement.reliability * (score - centre) for score in mean]
    is_set_aside = agreement.disagreement > MAX_DISAGREEMENT
    return {
        "one pass": first,
        "report": dict(zip(order, mean, strict=True)),
        "shrink": dict(zip(order, shrunk, strict=True)),
        "set_aside": dict.fromkeys(order, 0.0) if is_set_aside else dict(zip(order, mean, strict=True)),
    }


def _row(kind: str, size: int, reliability: float, sums: dict[str, Advantages]) -> dict[str, Cell]:
    found = {option: f"{one.signal:.2f} / {one.size:.2f}" for option, one in sums.items()}
    return {"answers": kind, "rollouts": size, "reliability": reliability, **found}


def _centred(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values)
    return [value - mean for value in values]
