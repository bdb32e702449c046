"""Reads logged trajectories, as dicts: their conversations, choices and texts.

Files are read leniently. A program of another time or another class of trajectories may have written them, so a part
that has an unexpected form is left out, and never an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]


def as_text(value: Any) -> str:
    """Return the text of a message's content. Parts that are no text are named, e.g. `[image_url]`."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_part_text(part) for part in value)
    return "" if value is None else str(value)


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        return as_text(part)
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return str(part[key])
    return f"[{part.get('type') or 'part'}]"


def number(value: Any) -> float | None:
    """Return a finite number as a float; `None` for anything else."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # a whole number of more than 300 digits
        return None


def whole(value: Any) -> int | None:
    """Return a whole number that fits into 63 bits; `None` for anything else."""
    value = number(value)
    return int(value) if value is not None and value == int(value) and abs(value) < 2**62 else None


def mapping(value: Any) -> Row:
    """Return a dict as it is, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def dicts(value: Any) -> list[Row]:
    """Return the dicts of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text_or_none(value: Any) -> str | None:
    """Return a text that is not empty; `None` for anything else."""
    return value if isinstance(value, str) and value else None


def histories(trajectory: Row) -> list[Row]:
    """Return the conversations of a trajectory, the main one first. Each has `messages_and_choices` and `tools`."""
    return [trajectory, *dicts(trajectory.get("additional_histories"))]


def items(history: Row) -> Iterator[tuple[Row, Row | None]]:
    """Yield each message of a conversation, with the choice that it comes from; `None` for a plain message."""
    for item in dicts(history.get("messages_and_choices")):
        if isinstance(item.get("message"), dict) and "finish_reason" in item:
            yield item["message"], item
        else:
            yield item, None


def choices(trajectory: Row) -> list[Row]:
    """Return the choices of all conversations of a trajectory."""
    return [choice for history in histories(trajectory) for _, choice in items(history) if choice is not None]


def exchange_ids(trajectory: Row) -> list[str]:
    """Return the ids of the recorded exchanges of a trajectory, each once."""
    ids = (text_or_none(choice.get("exchange_id")) for choice in choices(trajectory))
    return list(dict.fromkeys(exchange_id for exchange_id in ids if exchange_id is not None))


def exchange(choice: Row) -> Row:
    """Return what a choice says of its record: the fields of `ChoiceExchange`."""
    return mapping(choice.get("exchange"))


def num_tokens(choice: Row) -> int | None:
    """Return the number of sampled tokens of a choice; `None` where neither its record nor log-probs say it."""
    content = mapping(choice.get("logprobs")).get("content")
    return len(content) if isinstance(content, list) else whole(exchange(choice).get("completion_tokens"))


def reasoning(message: Row) -> str | None:
    """Return the reasoning of an answer."""
    return text_or_none(message.get("reasoning_content")) or text_or_none(message.get("reasoning"))


def tool_calls(message: Row) -> list[tuple[str | None, str, str]]:
    """Return the tool calls of a message as (id, name, arguments as text)."""
    sent = dicts(message.get("tool_calls"))
    calls = [(call.get("id"), mapping(call.get("function") or call.get("custom"))) for call in sent]
    if isinstance(message.get("function_call"), dict):
        calls.append((None, message["function_call"]))
    named = [(call_id, call.get("name"), call.get("arguments", call.get("input"))) for call_id, call in calls]
    return [(text_or_none(call_id), str(name or ""), as_text(arguments)) for call_id, name, arguments in named]


def texts(trajectory: Row) -> Iterator[str]:
    """Yield every text of a trajectory that a search looks at: messages, reasoning, tool calls and logs.

    Later conversations of a rollout often repeat the first one; a message that was seen before is left out.
    """
    seen: set[int] = set()
    for history in histories(trajectory):
        for message, _ in items(history):
            pieces = [as_text(message.get("content")), reasoning(message) or ""]
            pieces += [f"{name} {arguments}" for _, name, arguments in tool_calls(message)]
            if (key := hash(tuple(pieces))) not in seen:
                seen.add(key)
                yield from (piece for piece in pieces if piece)
    logs = trajectory.get("logs")
    yield from (line for line in logs if isinstance(line, str)) if isinstance(logs, list) else ()
