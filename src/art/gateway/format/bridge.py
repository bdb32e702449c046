"""Extending recorded tokens by new messages, proved on the text of the model's own chat template.

Let `before` be the template's text of the recorded conversation and `after` that of the same conversation with the new
messages and the opening of the next answer. If `after` goes on where `before` ends, what it adds belongs behind the
recorded tokens. With | for the turn end:

    before            user: hi|  assistant: hello|
    after             user: hi|  assistant: hello|  user: bye|  assistant:
    next prompt       recorded tokens up to the sampled |, then the tokens of "  user: bye|  assistant:"

The cut is at the token that ends a turn, so that nothing before it is ever tokenised again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

BranchReason = Literal[
    "unknown_history",  # an earlier answer was not recorded here
    "edited_history",  # an answer with a known exchange id, but other text
    "history_continues_elsewhere",  # the new messages hold an answer of their own
    "reasoning_dropped",  # the template drops the reasoning of earlier turns now
    "template_rewrites_history",  # the template renders earlier turns differently now
    "template_without_turn_end",  # no token marks the end of an answer, so there is no place to continue from
]
"""Why a later turn was rendered anew instead of extending recorded tokens."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A declared branch: this turn does not extend the recorded one."""

    reason: BranchReason


_EMPTY_THINK = re.compile(r"<think>\s*</think>")
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)


def extend_text(before: str, after: str, turn_end: str, *, keep_reasoning: bool) -> str | Branch:
    """What follows the turn end of the last recorded answer in `after`, or why it cannot follow.

    Templates print empty think blocks around the last answer and remove them later: that changes nothing of what was
    sampled and is no reason to branch. A template that drops real reasoning is one, unless `keep_reasoning`.
    """
    cut = before.rfind(turn_end)
    if cut < 0:
        return Branch("template_without_turn_end")
    cut += len(turn_end)
    head, rest = before[:cut], before[cut:]
    if after.startswith(before):
        return after[cut:]
    # The same number of turn ends lie before the cut, wherever the text around them changed.
    after_cut = _end_of_occurrence(after, turn_end, head.count(turn_end))
    if after_cut is None or not after.startswith(rest, after_cut):
        return Branch("template_rewrites_history")
    after_head = after[:after_cut]
    if _without(_EMPTY_THINK, head) == _without(_EMPTY_THINK, after_head):
        return after[after_cut:]
    if _without(_THINK, head) == _without(_THINK, after_head):
        return after[after_cut:] if keep_reasoning else Branch("reasoning_dropped")
    return Branch("template_rewrites_history")


def _without(blocks: re.Pattern[str], text: str) -> str:
    """Text without think blocks, and without any whitespace, since templates put some around them."""
    return "".join(blocks.sub("", text).split())


def _end_of_occurrence(text: str, needle: str, number: int) -> int | None:
    """Index just behind the `number`-th (from 1) occurrence of `needle`."""
    end = 0
    for _ in range(number):
        start = text.find(needle, end)
        if start < 0:
            return None
        end = start + len(needle)
    return end
