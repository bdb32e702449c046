"""The reward of a rollout, in parts, with its reason in words.

| outcome | reward |
|---|---|
| `correct`: the right answer, or "I don't know" after a search if the mailbox does not tell | 1 |
| `no_idea`: "I don't know", although the mailbox tells, or without a search | 0 |
| `unjudged`: an answer to a user's own question, of which the right answer is not known | 0 |
| `no_answer`: none within the turns | -0.5 |
| `wrong`: any other answer | -1 |
| `protocol_error`: not a valid tool call. The rollout ends, and no other part counts | -1.5 |

| part | adds |
|---|---|
| `found`: the share of the right emails that a search has shown | up to 0.05 |
| `read`: the share of them that were read | up to 0.1 |
| `sources`, if correct: how well the named sources fit, |named and right| / |named or right| | up to 0.3 |
| `turns`, if correct: the share of turns left over | up to 0.1 |
| `made_up`: an id was read or named that no email has | -0.1 |
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from art.tasks.mail_search.options import load_checker
from art.tasks.mail_search.prompts import names_the_emails
from art.tasks.mail_search.questions import Question, is_right, says_no_idea
from art.tasks.mail_search.tools import Desk

OUTCOMES = {
    "correct": 1.0, "no_idea": 0.0, "unjudged": 0.0, "no_answer": -0.5, "wrong": -1.0, "protocol_error": -1.5,
}  # fmt: skip
"""From best to worst; the other parts never change this order. `unjudged`: the right answer is not known."""
FOUND, READ, SOURCES, TURNS, MADE_UP = 0.05, 0.1, 0.3, 0.1, -0.1
BEST = 1 + FOUND + READ + SOURCES + TURNS


@dataclass(frozen=True, slots=True)
class Verdict:
    """How good a rollout was."""

    outcome: str
    parts: dict[str, float]
    """What the outcome and each other part add to the reward."""
    why: str

    @property
    def reward(self) -> float:
        return sum(self.parts.values())


async def reach_outcome(question: Question, desk: Desk, checker: str | None) -> str:
    """Tell how a rollout ended: a key of `OUTCOMES`.

    Args:
        checker: `module:function` that checks answers in place of the built-in comparison.
    """
    if desk.error is not None:
        return "protocol_error"
    if desk.answer is None:
        return "no_answer"
    if question.kind == "open":
        return "unjudged"
    if says_no_idea(desk.answer):
        return "correct" if question.is_unanswerable and desk.num_searches else "no_idea"
    if question.kind == "emails":
        is_correct = names_the_emails(question, f"{desk.answer} {' '.join(desk.sources)}", desk.mailbox)
    elif checker is None or question.answer is None:
        is_correct = is_right(question, desk.answer)
    else:
        verdict = load_checker(checker)(question.text, question.answer, desk.answer)
        is_correct = bool(await verdict if inspect.isawaitable(verdict) else verdict)
    return "correct" if is_correct else "wrong"


def judge(question: Question, desk: Desk, *, outcome: str, turns_left: float) -> Verdict:
    """Give a rollout its reward.

    Args:
        turns_left: share of the turns that were not needed, 0 to 1.
    """
    if outcome == "protocol_error":
        return Verdict(outcome, {"outcome": OUTCOMES[outcome]}, f"The rules were broken: {desk.error}.")
    right, is_correct = {*question.sources}, outcome == "correct"
    cited = _overlap({*desk.sources}, right)
    parts = {
        "outcome": OUTCOMES[outcome],
        "found": FOUND * _share(right, desk.seen),
        "read": READ * _share(right, desk.opened),
        "sources": SOURCES * cited * is_correct,
        "turns": TURNS * turns_left * is_correct,
        "made_up": MADE_UP if desk.num_made_up else 0.0,
    }
    return Verdict(outcome, parts, _explain(question, desk, outcome, cited))


def _share(right: set[str], reached: set[str]) -> float:
    return len(right & reached) / len(right) if right else 0.0


def _overlap(named: set[str], right: set[str]) -> float:
    return len(named & right) / len(named | right) if named | right else 1.0


def _explain(question: Question, desk: Desk, outcome: str, cited: float) -> str:
    expected = "that the mailbox does not tell" if question.is_unanswerable else repr(question.answer)
    reasons = {
        "correct": f"The answer {desk.answer!r} is right",
        "no_idea": f"It gave up; right was {expected}" if desk.num_searches else "It gave up without a search",
        "no_answer": f"The turns ended without an answer; right was {expected}",
        "wrong": f"The answer {desk.answer!r} is wrong; right was {expected}",
    }
    if question.kind == "open":
        return "The right answer to this question is not known; let a judge score it."
    told = [reasons[outcome]]
    if outcome == "correct" and cited < 1:
        told.append(
            f"its sources {', '.join(desk.sources) or '(none)'} should be {', '.join(question.sources) or 'none'}"
        )
    if question.sources and outcome != "correct":
        reached = (
            "read" if {*question.sources} <= desk.opened else "found" if {*question.sources} <= desk.seen else "missed"
        )
        told.append(f"the emails that tell were {reached}")
    if desk.num_made_up:
        told.append(f"{desk.num_made_up} ids were made up")
    return "; ".join(told) + "."
