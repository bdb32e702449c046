"""Whether answers depend on what the model was shown: the same answer, scored after another rollout's observation.

    conversation   user "board A"  assistant "7"  user "board B"  assistant "3"
    swapped        user "board A"  assistant "7"  user "board C"  assistant "3"
    reads          log p("3" | conversation) - log p("3" | swapped)     mean over answers, in nats per answer

The observation of an answer is the last user or tool message before it. A policy that does not look at its observations
gives both the same probability, and reinforcement learning then finds nothing that it could amplify.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_READS = 0.1
"""Nats per answer, below which answers do not depend on observations. Small games in which reinforcement learning
failed had 0.02 to 0.05, those in which it worked 0.38 and more."""

_OBSERVES = ("user", "tool")
_Slot = tuple[int, str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A conversation beside its copy with another observation. Both end with the same answer."""

    index: int
    """Place of the conversation among those that were given."""
    messages: list[Any]
    swapped: list[Any]


def split_at_answers(messages: Sequence[Any]) -> list[list[Any]]:
    """For each answer of a conversation, the conversation up to it. The answer is the last message of each."""
    return [list(messages[: i + 1]) for i, message in enumerate(messages) if message["role"] == "assistant"]


def swap_observations(conversations: Iterable[Sequence[Any]], rng: random.Random) -> list[Swap]:
    """Each conversation beside a copy whose last answer follows the observation of another conversation.

    The other observation is one of the same turn and the same tool, and of the most similar length, so that it differs
    in content and not in kind. Conversations without such a counterpart are left out: where all observations of a turn
    are equal nothing can be read from them.

    Args:
        conversations: messages in OpenAI's format, an answer at the end of each. Some hundred are enough: the work
            grows with the square of their number.
    """
    given = [list(messages) for messages in conversations]
    places = [_find_observation(messages) for messages in given]
    pool: dict[_Slot, dict[str, Any]] = defaultdict(dict)  # distinct contents by their text
    for messages, place in zip(given, places, strict=True):
        if place is not None:
            content = messages[place]["content"]
            pool[_slot(messages, place)].setdefault(_text(content), content)
    swaps = []
    for index, (messages, place) in enumerate(zip(given, places, strict=True)):
        if place is None:
            continue
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
    """Place of the last user or tool message before the last answer."""
    before = range(len(messages) - 2, -1, -1)
    return next((i for i in before if messages[i]["role"] in _OBSERVES and messages[i].get("content")), None)


def _slot(messages: Sequence[Any], place: int) -> _Slot:
    """What two observations must have in common to be exchanged: the number of answers before, the role, the tool."""
    observation = messages[place]
    calls = [call for message in messages[:place] for call in message.get("tool_calls") or ()]
    call_id = observation.get("tool_call_id")
    tool = next((call["function"]["name"] for call in reversed(calls) if call_id and call["id"] == call_id), None)
    return sum(message["role"] == "assistant" for message in messages[:place]), observation["role"], tool


def _text(content: Any) -> str:
    """Content that has parts is compared by the text of its parts, in order."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", part)) if isinstance(part, Mapping) else str(part) for part in content)
