"""Formats messages as text for people to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def format_message(message: Mapping[str, Any]) -> str:
    """Format a message as a heading and its parts:

    assistant:
    (thinking) Is it a draw?
    I look it up.
    -> search({"q": "x"})
    """
    lines = [f"{message.get('role', '?')}:"]
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        lines.append(f"(thinking) {reasoning}")
    if content := message.get("content"):
        lines.append(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    if refusal := message.get("refusal"):
        lines.append(f"(refusal) {refusal}")
    for call in message.get("tool_calls") or ():
        function = call["function"] if isinstance(call, Mapping) else call.function.model_dump()
        lines.append(f"-> {function['name']}({function['arguments']})")
    return "\n".join(lines)
