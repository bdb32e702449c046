"""A server of this folder within this process: its tools as a rollout shows them, and calls without a connection.

The official SDK (extra `mcp`) is imported when a server is loaded, not before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
from collections.abc import Coroutine
from typing import Any

from art.errors import ConfigError
from art.mcp import MCPTool, complete_task_tool
from art.mcp.client import INSTALL
from art.tasks.desks.rollout_states import RolloutStates


class LocalServer:
    """One of the servers, loaded into this process."""

    def __init__(self, module: str, *, states: str) -> None:
        """
        Args:
            module: name of the server's module in this folder.
            states: name of the `RolloutStates` in it.
        """
        self._module, self._states = module, states

    @functools.cached_property
    def module(self) -> Any:
        """The server's module.

        Raises:
            ConfigError: the SDK is not installed.
        """
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError(f"a task with an MCP server needs the official SDK: {INSTALL}")
        return importlib.import_module(f"art.tasks.desks.{self._module}")

    @property
    def states(self) -> RolloutStates[Any]:
        return getattr(self.module, self._states)  # type: ignore[no-any-return]

    @functools.cached_property
    def tools(self) -> list[MCPTool]:
        """The tools in the exact text of a rollout: a tiny model has one token for text that it always saw alike."""
        listed = _result_of(self.module.server.list_tools())
        # On the wire the type of a schema comes first.
        return [
            MCPTool(tool.name, tool.description or "", {"type": "object"} | dict(tool.input_schema)) for tool in listed
        ]

    @functools.cached_property
    def tool_schemas(self) -> list[Any]:
        """The tools of a request: those of the server and `complete_task`."""
        return [*(tool.to_tool_schema() for tool in self.tools), complete_task_tool]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, and return its result as the text that a rollout shows to the model."""
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            result = getattr(self.module, name)(**arguments)
            if inspect.iscoroutine(result):
                result = _result_of(result)
        except ToolError as error:
            return f"Error: Error executing tool {name}: {error}"
        if isinstance(result, str):
            return result
        if result == []:
            return '{"result": []}'
        items = result if isinstance(result, list) else [result]
        return "\n".join(item if isinstance(item, str) else json.dumps(item, indent=2) for item in items)


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop: the caller may be on one."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    coroutine.close()
    raise RuntimeError("a tool of a local server waited for something")
