"""`complete_task_tool`: the tool, in OpenAI's format, that an agent calls when it is done."""

from __future__ import annotations

from typing import Any

complete_task_tool: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "complete_task",
        "description": "Say that the task is done, or that it cannot be done. Nothing can be done after it.",
        "parameters": {
            "type": "object",
            "properties": {
                "summary": {"type": "string", "description": "What was done, and the answer if there is one."}
            },
            "required": ["summary"],
        },
    },
}
