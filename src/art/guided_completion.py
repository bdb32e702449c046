"""Parameters of a request that must repeat a teacher's answer, for code of ART 0.3 to 0.5 that distils by playing.

guided_choice, tool_choice, tools = get_guided_completion_params(teacher_completion, base_tools=tools)
await client.chat.completions.create(..., extra_body={"guided_choice": guided_choice})
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from art.errors import ConfigError


def freeze_tool_schema(tool: Mapping[str, Any], fixed_args: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a tool so that it can only be called with these arguments."""
    frozen = copy.deepcopy(dict(tool))
    frozen["function"]["parameters"] = {
        "type": "object",
        "properties": {name: {"enum": [value]} for name, value in fixed_args.items()},
        "required": list(fixed_args),
        "additionalProperties": False,
    }
    return frozen


def get_guided_completion_params(
    completion: Any, base_tools: Iterable[Mapping[str, Any]] | None = None
) -> tuple[list[str] | None, dict[str, Any] | None, list[dict[str, Any]] | None]:
    """Return `guided_choice`, `tool_choice` and `tools` that leave a model only the answer of `completion`.

    Args:
        completion: A chat completion of the teacher; its first choice counts, and of that the first tool call.
        base_tools: The tools that the teacher was offered, for an answer that calls one of them.

    Raises:
        ConfigError: the answer calls a tool that is not in `base_tools`.
    """
    message = completion.choices[0].message
    if not message.tool_calls:
        return [message.content or ""], None, None
    called = message.tool_calls[0].function
    tool = next((tool for tool in base_tools or () if tool["function"]["name"] == called.name), None)
    if tool is None:
        raise ConfigError(f"the answer calls the tool {called.name!r}, which is not in `base_tools`: pass it there")
    choice = {"type": "function", "function": {"name": called.name}}
    return None, choice, [freeze_tool_schema(tool, json.loads(called.arguments))]
