"""Extend recorded tokens by new messages, after checking on the chat template's text that this is correct.

`before` is the text that the template renders for the recorded conversation. `after` is its text for that conversation
with the new messages and the opening of the next answer. If `after` begins with `before`, the text that it adds follows
the recorded tokens. With | for the turn end:

    before            user: hi|  assistant: hello|
    after             user: hi|  assistant: hello|  user: bye|  assistant:
    next prompt       recorded tokens up to the sampled |, then the tokens of "  user: bye|  assistant:"

The cut is at the token that ends a turn, so nothing before it is ever tokenised again.
"""

from __future__ import annotations

import re

from art.protocol.answers import Branch

_CLOSING = "</think>"
_EMPTY_THINK = re.compile(r"<think>\s*</think>")
THINK = re.compile(r"<think>.*?</think>", re.DOTALL)


def extend_text(before: str, after: str, turn_end: str, *, keep_reasoning: bool) -> str | Branch:
    """Return the text to add after the turn end of the last recorded answer, or a branch if earlier text changed.
    `before` is the text of the recorded conversation, and `after` is its text with new messages. A template that prints
    an empty think block before the last answer and removes it later changes no sampled token, so this is no branch.
    Dropping real reasoning is one, unless `keep_reasoning` is set."""
    cut = before.rfind(turn_end)
    if cut < 0:
        return Branch("template_without_turn_end")
    cut += len(turn_end)
    head, rest = before[:cut], before[cut:]
    if after.startswith(before):
        return after[cut:]
    # The text before the cut may have changed, but the number of turn ends in it has not.
    *ended, _ = after.split(turn_end, head.count(turn_end))
    after_head = "".join(part + turn_end for part in ended)
    after_cut = len(after_head)
    if len(ended) < head.count(turn_end) or not after.startswith(rest, after_cut):
        return Branch("template_rewrites_history")
    if without(_EMPTY_THINK, head) == without(_EMPTY_THINK, after_head):
        return after[after_cut:]
    if without(THINK, head) == without(THINK, after_head):
        return after[after_cut:] if keep_reasoning else Branch("reasoning_dropped")
    return Branch("template_rewrites_history")


def without(blocks: re.Pattern[str], text: str) -> str:
    """Remove what `blocks` matches, and all whitespace, since templates put whitespace around think blocks."""
    # Only up to the last closing tag: from each opening tag without one, the pattern would search to the end.
    end = text.rfind(_CLOSING) + len(_CLOSING) if _CLOSING in text else 0
    return "".join((blocks.sub("", text[:end]) + text[end:]).split())
