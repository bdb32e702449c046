"""Messages and tools in the form of OpenTelemetry's GenAI conventions.

    {"role": "user", "content": "hi"}   ->   {"role": "user", "parts": [{"type": "text", "content": "hi"}]}

The forms are those of the conventions' JSON schemas for `gen_ai.input.messages`, `gen_ai.output.messages` and
`gen_ai.tool.definitions`. Each attribute holds JSON text that stays valid below its limit: long texts are shortened,
then the oldest messages are left out, and a part of type `art.left_out` says how much is missing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from art.messages import to_message
from art.trajectory import History

_FINISH_REASONS = {"tool_calls": "tool_call"}
"""OpenAI's finish reasons that the conventions' messages spell in another way."""


def clean(text: str) -> str:
    """Replace what UTF-8 cannot say (half of a surrogate pair), which JSON may hold and protobuf refuses."""
    return text.encode("utf-8", "replace").decode()


def to_json(value: Any) -> str:
    return clean(json.dumps(value, ensure_ascii=False, default=str))


class Conversation:
    """The texts of one conversation. Each message is converted once, although every later request repeats it."""

    def __init__(self, history: History, limit: int) -> None:
        """
        Args:
            limit: longest text of one attribute in characters, about.
        """
        self._items, self._limit = history.messages_and_choices, limit
        self._texts = [to_json(_shorten(_message(to_message(item)), limit // 4)) for item in self._items]
        self._tools = _tool_definitions(history.tools, limit) if history.tools else None

    def request(self, place: int) -> dict[str, Any]:
        """Return the attributes of the request whose answer is at `place`."""
        tools = {} if self._tools is None else {"gen_ai.tool.definitions": self._tools}
        return {"gen_ai.input.messages": self.before(place), "gen_ai.output.messages": self.answer(place), **tools}

    def before(self, place: int) -> str:
        """Return the messages and answers before an item, as `gen_ai.input.messages`. The newest are kept."""
        first, size = place, 0
        while first > 0 and (first == place or size + len(self._texts[first - 1]) <= self._limit):
            first -= 1
            size += len(self._texts[first]) + 2
        missing = {"role": "system", "parts": [{"type": "art.left_out", "messages": first}]}
        return f"[{', '.join(([to_json(missing)] if first else []) + self._texts[first:place])}]"

    def answer(self, place: int) -> str:
        """Return the answer at a place, as `gen_ai.output.messages`."""
        choice = self._items[place]
        reason = str(getattr(choice, "finish_reason", None) or "")
        message = _shorten(_message(to_message(choice)), self._limit // 2)
        return to_json([{**message, "finish_reason": _FINISH_REASONS.get(reason, reason)}])


def _tool_definitions(tools: Iterable[Any], limit: int) -> str:
    """The tools as JSON text; only their names if that is longer than `limit`."""
    definitions = [_definition(tool) for tool in tools]
    text = to_json(definitions)
    return text if len(text) <= limit else to_json([{"type": one["type"], "name": one["name"]} for one in definitions])


def tool_description(tools: Iterable[Any] | None, name: str) -> str | None:
    """Return the description of the tool called `name`; `None` if there is none."""
    texts = (one.get("description") for one in map(_definition, tools or ()) if one["name"] == name)
    return next((text for text in texts if isinstance(text, str)), None)


def tool_calls(choice: Any) -> list[tuple[str | None, str, Any]]:
    """Return id, name and arguments of each function call of an answer. Arguments are text if they are not JSON."""
    return [(part["id"], part["name"], part["arguments"]) for part in _calls(to_message(choice))]


def tool_result(message: Mapping[str, Any]) -> str:
    """Return the answer of a tool as text."""
    content = message.get("content")
    return content if isinstance(content, str) else to_json(content)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = str(message.get("role", "")), message.get("content")
    parts: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        parts.append({"type": "reasoning", "content": str(reasoning)})
    if role == "tool":
        call_id = message.get("tool_call_id")
        parts.append({"type": "tool_call_response", "id": call_id, "response": tool_result(message)})
    elif isinstance(content, str):
        parts += [{"type": "text", "content": content}] if content else []
    elif content is not None:
        parts += map(_part, content if isinstance(content, list) else [content])
    parts += _calls(message)
    if refusal := message.get("refusal"):
        parts.append({"type": "refusal", "content": str(refusal)})
    name = message.get("name")
    return {"role": role, "parts": parts, **({"name": str(name)} if name is not None else {})}


def _part(part: Any) -> dict[str, Any]:
    """Convert a part of OpenAI's multimodal content. Unknown ones keep their type and fields."""
    if not isinstance(part, Mapping):
        return {"type": "text", "content": str(part)}
    kind = str(part.get("type", ""))
    if kind == "text":
        return {"type": "text", "content": str(part.get("text", ""))}
    if kind == "image_url":
        image = part.get("image_url")
        return _media(str(image.get("url", "") if isinstance(image, Mapping) else image), "image")
    if kind == "input_audio" and isinstance(audio := part.get("input_audio"), Mapping):
        mime_type = f"audio/{audio.get('format', 'wav')}"
        return {"type": "blob", "modality": "audio", "mime_type": mime_type, "content": str(audio.get("data", ""))}
    return {**part, "type": kind}


def _media(url: str, modality: str) -> dict[str, Any]:
    header, comma, data = url.partition(",")
    if not comma or not header.startswith("data:"):
        return {"type": "uri", "modality": modality, "uri": url}
    mime_type = header.removeprefix("data:").partition(";")[0] or None
    return {"type": "blob", "modality": modality, "mime_type": mime_type, "content": data}


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [_call(call) for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call.get("custom"))
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments", function.get("input"))
    with contextlib.suppress(ValueError):  # a model may write something else than JSON, which is shown as it is
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    call_id = call.get("id")
    return {
        "type": "tool_call",
        "id": None if call_id is None else str(call_id),
        "name": str(function.get("name", "")),
        "arguments": arguments,
    }


def _definition(tool: Any) -> dict[str, Any]:
    tool = tool if isinstance(tool, Mapping) else {}
    function = tool.get("function")
    function = function if isinstance(function, Mapping) else tool
    known = {key: function[key] for key in ("description", "parameters") if function.get(key) is not None}
    return {"type": str(tool.get("type", "function")), "name": str(function.get("name", "")), **known}


def _shorten(message: dict[str, Any], limit: int) -> dict[str, Any]:
    """Shorten each part to about `limit` characters."""
    return {**message, "parts": [_short_part(part, limit) for part in message["parts"]]}


def _short_part(part: dict[str, Any], limit: int) -> dict[str, Any]:
    size = len(to_json(part))
    if size <= limit:
        return part
    for key in ("content", "response", "arguments"):
        if part.get("type") != "blob" and key in part:
            value = part[key] if isinstance(part[key], str) else to_json(part[key])
            return {**part, key: short_text(value, limit)}
    return {"type": "art.left_out", "part": part.get("type"), "characters": size}


def short_text(text: str, limit: int) -> str:
    """Return the beginning of a text that is longer than `limit`, with a note of what is left out."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} characters left out)"
