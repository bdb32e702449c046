"""Exchange observations between rollouts, to measure whether answers depend on what the model was shown.

    conversation   user "board A"  assistant "7"  user "board B"  assistant "3"
    swapped        user "board A"  assistant "7"  user "board C"  assistant "3"
    difference     log p("3" | conversation) - log p("3" | swapped)     mean over answers, in nats per answer

The observation of an answer is the last user or tool message before it. A policy that ignores its observations gives
both the same probability, and then reinforcement learning has nothing to improve.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_READS = 0.1
"""Difference of log-probs in nats per answer, below which answers do not depend on observations. Small games in which
reinforcement learning failed had 0.02 to 0.05; games in which it worked had 0.38 and more."""

_OBSERVES = ("user", "tool")
_Slot = tuple[int, str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A conversation, and its copy with another observation before the last answer. Both end with the same answer."""

    index: int
    """Index of the conversation in the input of `swap_observations`."""
    messages: list[Any]
    swapped: list[Any]


def split_at_answers(messages: Sequence[Any]) -> list[list[Any]]:
    """For each answer of a conversation, return the conversation up to and including it."""
    return [list(messages[: i + 1]) for i, message in enumerate(messages) if message["role"] == "assistant"]


def swap_observations(conversations: Iterable[Sequence[Any]], rng: random.Random) -> list[Swap]:
    """Pair each conversation with a copy in which the observation of its last answer comes from another conversation.

    The other observation is from the same turn and tool and has the most similar length, so that it differs in content
    and not in kind. Conversations without such an observation are left out, e.g. if all observations of a turn are
    equal.

    Args:
        conversations: messages in OpenAI's format; each conversation ends with an answer. A few hundred are enough. The
            work grows with the square of their number.
    """
    observed = [
        (index, list(messages), place)
        for index, messages in enumerate(conversations)
        if (place := _find_observation(messages)) is not None
    ]
    pool: dict[_Slot, dict[str, Any]] = defaultdict(dict)  # distinct contents by their text
    for _, messages, place in observed:
        content = messages[place]["content"]
        pool[_slot(messages, place)].setdefault(_text(content), content)
    swaps = []
    for index, messages, place in observed:
        own = _text(messages[place]["content"])
        others = [text for text in pool[_slot(messages, place)] if text != own]
        if not others:
            continue
        nearest = min(abs(len(text) - len(own)) for text in others)
        text = rng.choice([text for text in others if abs(len(text) - len(own)) == nearest])
        observation = {**messages[place], "content": pool[_slot(messages, place)][text]}
        swapped = [*messages[:place], observation, *messages[place + 1 :]]
        swaps.append(Swap(index=index, messages=messages, swapped=swapped))
    return swaps


def _find_observation(messages: Sequence[Any]) -> int | None:
    """Index of the last user or tool message before the last answer, if there is one."""
    before = range(len(messages) - 2, -1, -1)
    return next((i for i in before if messages[i]["role"] in _OBSERVES and messages[i].get("content")), None)


def _slot(messages: Sequence[Any], place: int) -> _Slot:
    """Observations may be exchanged if this is equal: the number of answers before, the role and the tool."""
    observation = messages[place]
    calls = [call for message in messages[:place] for call in message.get("tool_calls") or ()]
    call_id = observation.get("tool_call_id")
    tool = next((call["function"]["name"] for call in reversed(calls) if call_id and call["id"] == call_id), None)
    return sum(message["role"] == "assistant" for message in messages[:place]), observation["role"], tool


def _text(content: Any) -> str:
    """The text of a message's content. Parts are joined in order."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", part)) if isinstance(part, Mapping) else str(part) for part in content)
