"""Tools and resources of an MCP server, and scenarios for them. All convert by `to_dict` and `from_dict`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from art.scenarios.written import MAX_DIFFICULTY, MIN_DIFFICULTY


@dataclass
class _FromDict:
    """Conversion of a dataclass to a dict and back."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Make an object from a mapping of its fields.

        Raises:
            ValueError: a field is missing or unknown.
        """
        try:
            return cls(**data)
        except TypeError:
            keys = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            names = list(inspect.signature(cls).parameters)
            raise ValueError(f"{cls.__name__} has the fields {names}, got {keys}") from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class MCPTool(_FromDict):
    """A tool that an MCP server offers."""

    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments."""

    def to_tool_schema(self) -> dict[str, Any]:
        """The tool in the format of OpenAI's `tools=`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass
class MCPResource(_FromDict):
    """A resource that an MCP server offers."""

    uri: str
    name: str
    description: str
    mime_type: str | None = None


@dataclass
class GeneratedScenario(_FromDict):
    """A scenario: a task for an agent that uses the tools of an MCP server, with its difficulty."""

    task: str
    """What the agent is told to do."""
    difficulty: int
    """Difficulty from 1 (one call) to 5 (many calls that depend on each other)."""

    def __post_init__(self) -> None:
        if isinstance(self.difficulty, bool) or self.difficulty not in range(MIN_DIFFICULTY, MAX_DIFFICULTY + 1):
            raise ValueError(
                f"difficulty must be a whole number from {MIN_DIFFICULTY} to {MAX_DIFFICULTY}, got {self.difficulty!r}"
            )

    def preview(self, max_length: int = 120) -> str:
        """The task, cut to `max_length` characters."""
        return self.task if len(self.task) <= max_length else self.task[: max(0, max_length - 3)] + "..."


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
