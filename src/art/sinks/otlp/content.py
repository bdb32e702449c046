"""Messages and tools in the form of OpenTelemetry's GenAI conventions.

    {"role": "user", "content": "hi"}   ->   {"role": "user", "parts": [{"type": "text", "content": "hi"}]}

The forms are those of the conventions' JSON schemas for `gen_ai.input.messages`, `gen_ai.output.messages` and
`gen_ai.tool.definitions`. Each attribute holds JSON text that stays valid below its limit: long texts are shortened,
then the oldest messages are left out, and a part of type `art.left_out` says how much is missing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from art.messages import is_choice, to_message

_FINISH_REASONS = {"tool_calls": "tool_call"}
"""OpenAI's finish reasons that the conventions' messages spell in another way."""


def clean(text: str) -> str:
    """Replace what UTF-8 cannot say (half of a surrogate pair), which JSON may hold and protobuf refuses."""
    return text.encode("utf-8", "replace").decode()


def to_json(value: Any) -> str:
    return clean(json.dumps(value, ensure_ascii=False, default=str))


def input_messages(items: Sequence[Any], limit: int) -> str:
    """Return messages and earlier answers as JSON text of at most about `limit` characters, the newest first kept."""
    messages = [_shorten(_message(to_message(item)), limit // 4) for item in items]
    kept: list[dict[str, Any]] = []
    size = 0
    for message in reversed(messages):
        size += len(to_json(message)) + 2
        if kept and size > limit:
            break
        kept.append(message)
    if len(kept) < len(messages):
        missing = {"type": "art.left_out", "messages": len(messages) - len(kept)}
        kept.append({"role": "system", "parts": [missing]})
    return to_json(kept[::-1])


def output_messages(choice: Any, limit: int) -> str:
    """Return the answer of a choice as JSON text."""
    message = _shorten(_message(to_message(choice)), limit // 2)
    reason = getattr(choice, "finish_reason", None) if is_choice(choice) else None
    reason = str(reason or "")
    return to_json([{**message, "finish_reason": _FINISH_REASONS.get(reason, reason)}])


def tool_definitions(tools: Iterable[Any], limit: int) -> str:
    """Return the tools that a model was offered as JSON text; only their names if that is longer than `limit`."""
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
