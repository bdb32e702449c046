"""Judges a group that is too large for one question in several rounds that share two trajectories, the anchors.

    round 1    a b c d e          the best and the worst, say b and e, become the anchors
    round 2    b e f g h          the anchors are judged again with new trajectories
    round 3    b e i j k

A judge that compares uses another scale in every round. A straight line maps the anchors' scores in a later round to
those in the first, and is applied to the other scores of that round.

Two passes over a group (judgements in opposite orders) are compared too. Reliability r is the share of the variance
within the group that both agree on, 2 cov / (var + var): 1 for passes that differ at most in level, 0 for unrelated
ones. The mean of two passes has reliability 2r / (1 + r) (Spearman 1910, Brown 1910). With a known reliability, the
best estimate of a noiseless score is the group's mean plus reliability times the score's distance from it (Kelley
1927); `shrink` does that with the reliability of the one group, which few scores tell badly. Order bias is opposite in
the two passes: it cancels in their mean, and lowers r. docs/decisions/0030 says why shrinking is not the default.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from art.errors import ContextLengthError, JudgeError
from art.rewards.asking.evidence import Evidence, common_prefix, encode
from art.rewards.asking.grader import Grader
from art.rewards.judge import Judgement

logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 3.0
"""A low estimate, to be safe: English prose has about 4 characters per token, code and JSON about 3."""
_INSTRUCTION_TOKENS = 1000
_ANSWER_TOKENS = 200
"""Tokens of the judge's answer per trajectory."""
_MIN_SPREAD = 0.1
"""If the anchors' scores are closer than this, they only shift the scores of a round and do not stretch them."""
_MAX_STRETCH = 2.0
_MIN_CONTEXT_TOKENS = 512


async def grade_in_rounds(grader: Grader, evidence: Sequence[Evidence], order: Sequence[int]) -> Judgement:
    """Score a group in as few rounds (questions with a part of its trajectories) as the judge's context allows.

    Args:
        order: indices of the evidence, in the order in which it is shown.

    Raises:
        JudgeError: the judge gave no usable answer, or its context is too short for two of the trajectories.
    """
    context_tokens = await grader.client.context_tokens()
    sizes = estimate(evidence)
    while True:
        rounds = plan_rounds(sizes, order, context_tokens)
        try:
            return await _play(grader, evidence, rounds)
        except ContextLengthError as error:
            # The judge's context is shorter than known. Try half of the question that was too long.
            largest = max(sizes.question(members) for members in rounds)
            context_tokens = largest // 2
            if context_tokens < _MIN_CONTEXT_TOKENS:
                raise JudgeError(error.message) from error
            logger.info("judge: a question of about %d tokens is too long; judging in smaller rounds", largest)


async def _play(grader: Grader, evidence: Sequence[Evidence], rounds: list[list[int]]) -> Judgement:
    """Judge the first round, choose the anchors, then judge the other rounds one after another."""
    first = await grader.grade([evidence[i] for i in rounds[0]])
    verdicts = dict(zip(rounds[0], first.verdicts, strict=True))
    judgements = [first]
    ranked = sorted(rounds[0], key=lambda i: verdicts[i].score)
    anchors = [ranked[0], ranked[-1]][-num_anchors(rounds[0]) :]
    for members in rounds[1:]:
        # Show the anchors in the middle, so that their place tells nothing about them.
        shown = [*members[: len(members) // 2], *anchors, *members[len(members) // 2 :]]
        judgement = await grader.grade([evidence[i] for i in shown])
        judgements.append(judgement)
        in_round = dict(zip(shown, judgement.verdicts, strict=True))
        scores = align([in_round[i].score for i in anchors], [verdicts[i].score for i in anchors],
                       [in_round[i].score for i in members])  # fmt: skip
        verdicts |= {i: replace(in_round[i], score=score) for i, score in zip(members, scores, strict=True)}
    return grader.join(judgements, [verdicts[i] for i in range(len(evidence))])


def align(anchors: Sequence[float], targets: Sequence[float], scores: Sequence[float]) -> list[float]:
    """Bring scores to another scale by the straight line that maps `anchors` to `targets`, and clip them to 0 to 1.

    Example: with anchors 0.2 and 0.6 and targets 0.4 and 0.8, a score of 0.5 becomes 0.7.
    """
    spread, target_spread = anchors[-1] - anchors[0], targets[-1] - targets[0]
    slope = target_spread / spread if spread >= _MIN_SPREAD and target_spread >= _MIN_SPREAD else 1.0
    slope = min(max(slope, 1 / _MAX_STRETCH), _MAX_STRETCH)
    middle, target = sum(anchors) / len(anchors), sum(targets) / len(targets)
    return [min(max(target + slope * (score - middle), 0.0), 1.0) for score in scores]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Estimated numbers of tokens in a question about a group."""

    shared: int
    """Tokens of the common prefix and the instructions."""
    own: list[int]
    """Tokens of each trajectory, with the judge's answer about it."""

    def question(self, members: Sequence[int]) -> int:
        return self.shared + sum(self.own[i] for i in members)


def estimate(evidence: Sequence[Evidence]) -> Sizes:
    prefix = common_prefix([item.messages for item in evidence])
    shared = len(encode(evidence[0].messages[:prefix])) / CHARS_PER_TOKEN
    texts = [encode([item.messages[prefix:], item.histories, item.tools]) for item in evidence]
    return Sizes(
        int(shared) + _INSTRUCTION_TOKENS, [int(len(text) / CHARS_PER_TOKEN) + _ANSWER_TOKENS for text in texts]
    )


def plan_rounds(sizes: Sizes, order: Sequence[int], context_tokens: int | None) -> list[list[int]]:
    """Divide a group into rounds that fit the judge's context, each a list of indices in `order`.

    Later rounds leave room for the anchors (trajectories of the first round), assumed to be the longest.

    Raises:
        JudgeError: not even the smallest rounds fit into the judge's context.
    """
    if context_tokens is None or sizes.question(order) <= context_tokens:
        return [list(order)]
    longest = sorted(sizes.own)[-2:]
    rounds: list[list[int]] = []
    members: list[int] = []
    room = context_tokens - sizes.shared
    for index in order:
        if members and sizes.own[index] > room:
            rounds.append(members)
            members = []
            room = context_tokens - sizes.shared - sum(longest[-num_anchors(rounds[0]) :])
        members.append(index)
        room -= sizes.own[index]
        if room < 0:
            break
    if room < 0 or len([*rounds, members][0]) < 2:
        raise JudgeError(
            f"the judge's context has about {context_tokens} tokens, and the two longest trajectories need about "
            f"{sizes.shared + sum(longest)}; choose a judge with a longer context"
        )
    return [*rounds, members]


def num_anchors(first_round: Sequence[int]) -> int:
    """Number of anchors, trajectories of the first round that later rounds repeat: two, or one if it has only two."""
    return 2 if len(first_round) > 2 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two passes over a group (a judge's scores with the trajectories shown in opposite orders) agree."""

    disagreement: float
    """Root mean square difference of the two scores of a trajectory, each relative to the mean of its pass."""
    single_reliability: float
    """Reliability of one pass, 0 to 1. It is 1 if all scores within each pass are equal."""

    @property
    def reliability(self) -> float:
        """Reliability of the mean of both passes, 0 to 1."""
        return 2 * self.single_reliability / (1 + self.single_reliability)


def compare_passes(first: Sequence[float], second: Sequence[float]) -> Agreement:
    """Measure how far two passes over a group agree, from the scores of its trajectories in each.

    Example: (0, 1) and (0.2, 0.8) differ by 0.2 on each trajectory; reliability of one pass 0.88, of the mean 0.94.
    """
    a, b = _centred(first), _centred(second)
    disagreement = math.sqrt(statistics.fmean((x - y) ** 2 for x, y in zip(a, b, strict=True)))
    spread = sum(x * x for x in a) + sum(y * y for y in b)
    if spread < 1e-12:
        return Agreement(disagreement=disagreement, single_reliability=1.0)
    shared = 2 * sum(x * y for x, y in zip(a, b, strict=True)) / spread
    return Agreement(disagreement=disagreement, single_reliability=max(0.0, shared))


def shrink(scores: Sequence[float], reliability: float) -> list[float]:
    """Move scores towards their mean: only the share `reliability` of their distance from it is kept."""
    mean = statistics.fmean(scores)
    return [mean + reliability * (score - mean) for score in scores]


def _centred(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values)
    return [value - mean for value in values]
