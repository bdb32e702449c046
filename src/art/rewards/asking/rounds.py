"""Groups that are too large for one question are judged in rounds, like a tournament with seeded players.

    round 1    a b c d e          the best and the worst of it, say b and e, become the anchors
    round 2    b e f g h          takes part with them
    round 3    b e i j k

A judge that compares uses its scale anew in every round. The anchors are in all rounds, and the straight line that
takes their scores in a later round to those of the first brings the other scores along.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from art.errors import ContextLengthError, JudgeError
from art.rewards.asking.evidence import Evidence, common_prefix, encode
from art.rewards.asking.grader import Grader, Grading, add_gradings

logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 3.0
"""On the safe side: English prose has about 4, code and JSON about 3."""
_INSTRUCTION_TOKENS = 1000
_ANSWER_TOKENS = 200
"""Per trajectory."""
_MIN_SPREAD = 0.1
"""Below this distance of the anchors in a round only the level of their scores is used, not their distance."""
_MAX_STRETCH = 2.0
_MIN_CONTEXT_TOKENS = 512


async def grade_in_rounds(grader: Grader, evidence: Sequence[Evidence], order: Sequence[int]) -> Grading:
    """As `Grader.grade`, in as few rounds as the judge's context allows.

    Raises:
        JudgeError: no usable answer came, or two trajectories do not fit together.
    """
    context_tokens = await grader.client.context_tokens()
    sizes = estimate(evidence)
    while True:
        rounds = plan_rounds(sizes, order, context_tokens)
        try:
            return await _play(grader, evidence, rounds)
        except ContextLengthError as error:
            # The judge can read less than is known: half of what was too much.
            largest = max(sizes.question(members) for members in rounds)
            context_tokens = largest // 2
            if context_tokens < _MIN_CONTEXT_TOKENS:
                raise JudgeError(error.message) from error
            logger.info("judge: a question of about %d tokens is too long, trying in rounds", largest)


async def _play(grader: Grader, evidence: Sequence[Evidence], rounds: list[list[int]]) -> Grading:
    """The first round settles the anchors, and the others follow one after the other."""
    first = await _grade_some(grader, evidence, rounds[0])
    verdicts = dict(zip(rounds[0], first.verdicts, strict=True))
    gradings = [first]
    ranked = sorted(rounds[0], key=lambda i: verdicts[i].score)
    anchors = [ranked[0], ranked[-1]][-num_anchors(rounds[0]) :]
    for members in rounds[1:]:
        # Anchors are shown among the others, so that their place says nothing about them.
        shown = [*members[: len(members) // 2], *anchors, *members[len(members) // 2 :]]
        grading = await _grade_some(grader, evidence, shown)
        gradings.append(grading)
        here = dict(zip(shown, grading.verdicts, strict=True))
        scores = align([here[i].score for i in anchors], [verdicts[i].score for i in anchors],
                       [here[i].score for i in members])  # fmt: skip
        verdicts |= {i: replace(here[i], score=score) for i, score in zip(members, scores, strict=True)}
    return add_gradings(gradings, [verdicts[i] for i in range(len(evidence))])


async def _grade_some(grader: Grader, evidence: Sequence[Evidence], members: Sequence[int]) -> Grading:
    return await grader.grade([evidence[i] for i in members], order=range(len(members)))


def align(anchors: Sequence[float], targets: Sequence[float], scores: Sequence[float]) -> list[float]:
    """`scores` on the scale on which `anchors` are `targets`, within 0 to 1.

    Example: anchors 0.2 and 0.6 that should be 0.4 and 0.8 take 0.5 to 0.7.
    """
    spread, wanted = anchors[-1] - anchors[0], targets[-1] - targets[0]
    slope = wanted / spread if spread >= _MIN_SPREAD and wanted >= _MIN_SPREAD else 1.0
    slope = min(max(slope, 1 / _MAX_STRETCH), _MAX_STRETCH)
    middle, target = sum(anchors) / len(anchors), sum(targets) / len(targets)
    return [min(max(target + slope * (score - middle), 0.0), 1.0) for score in scores]


@dataclass(frozen=True, slots=True)
class Sizes:
    """About how many tokens a group takes."""

    shared: int
    """The common prefix, and the instructions."""
    own: list[int]
    """Of each trajectory, with what the judge says about it."""

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
    """Who is judged together. Later rounds leave room for two anchors, taken to be the longest trajectories.

    Raises:
        JudgeError: not even the smallest rounds fit.
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
            f"the judge reads about {context_tokens} tokens, and the longest of these trajectories need about "
            f"{sizes.shared + sum(longest)}: choose a judge with a longer context"
        )
    return [*rounds, members]


def num_anchors(first_round: Sequence[int]) -> int:
    """Two tell how the scales of two rounds differ in level and width. One does where two would fill the round."""
    return 2 if len(first_round) > 2 else 1
