"""Whether a checkpoint is better than another one, by an interval that stays honest when the question is repeated.

A script that compares every new checkpoint with the same old one finds a "better" one by chance. Each comparison with
the same reference is therefore a *look*, and look k may err with the probability 0.05 / (k (k + 1)). These sum to 0.05
over any number of looks: 0.025 + 0.008 + 0.004 + ...

The first look has the lower end of an ordinary 95 % interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from art.report.scores import Method, Score, score_difference

FALSE_PROMOTIONS = 0.05
"""Largest probability that any of all looks passes a checkpoint that is not better than the reference."""
MIN_SCENARIOS: Mapping[Method, int] = {"tango": 10, "t": 30}
"""Fewest scenarios of a comparison, by the method of its interval. With fewer, chance often looks certain.

Student's t needs more: of a candidate that gains a little in most scenarios and loses much in a few, 10 scenarios
often show the gains only.
"""

Values = Mapping[str, Sequence[float]]
"""Values of the rollouts of each scenario, by its id."""


def tail_of_look(look: int) -> float:
    """Return the probability with which the comparison number `look`, from 1 on, may pass what is not better."""
    return FALSE_PROMOTIONS / (look * (look + 1))


def measure_improvement(reference: Values, candidate: Values, *, look: int) -> Score | None:
    """Estimate `candidate - reference` on the scenarios that both have; `None` if there is none.

    Its `low` is the bound that an equal candidate exceeds with the probability `tail_of_look(look)`.
    """
    common = sorted(reference.keys() & candidate.keys())
    if not common:
        return None
    pairs = [[values[name] for name in common] for values in (reference, candidate)]
    return score_difference(*pairs, tail=tail_of_look(look))
