"""`art mcp [DIR]`: let a coding agent read runs. An MCP server on standard input and output, which changes nothing.

Its tools are the answers of the page: runs with their findings, metrics, rollouts, exact tokens, comparisons, costs.
`art view --read` prints the same. The tool `doctor` runs `art doctor`.

    claude mcp add art -- art mcp /path/to/.art
    art mcp --url http://gpu-machine:5000         the runs of a server elsewhere
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import art
from art.errors import ArtError, ConfigError, InvalidRequestError
from art.task import list_tasks
from art_page.command import PageReader, add_place_options, chosen_url

if TYPE_CHECKING:
    from mcp.server import Server
    from mcp.types import Tool

    from art_page.page import ReadPath

HOW = """What reinforcement learning with ART has recorded, to read only. Begin with `runs`, which has project and name
of each. `run` has its findings (what is wrong, and what to do) and the names of its metrics; `series` has their values.
`rollouts` lists rollouts, e.g. by reward; `rollout` and `tokens` show one. `compare` tells whether a later step is
better on the same held-out scenarios. `doctor` checks a base model before a training."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place_options(parser)


def run(args: argparse.Namespace) -> int:
    with contextlib.closing(PageReader(args.data_dirs, chosen_url(args))) as reader:
        asyncio.run(_serve(make_server(reader)))
    return 0


async def _serve(server: Server[Any]) -> None:
    from mcp.server.stdio import stdio_server

    async with stdio_server() as streams:
        await server.run(streams[0], streams[1], server.create_initialization_options())


def make_server(reader: PageReader) -> Server[Any]:
    """Make an MCP server with one tool for each answer of the page, and `doctor`."""
    from mcp import types
    from mcp.server import Server

    from art_page.page import PATHS

    rows = {row.method.__name__: row for row in PATHS}

    async def list_tools(*_: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[*map(_tool, rows.values()), _doctor_tool()])

    async def call_tool(_: object, call: types.CallToolRequestParams) -> types.CallToolResult:
        arguments = {name: value for name, value in (call.arguments or {}).items() if value is not None}
        try:
            if call.name == "doctor":
                text = await asyncio.to_thread(examine, arguments)
            elif call.name in rows:
                text = await asyncio.to_thread(reader.read, path_of(rows[call.name], arguments))
            else:
                raise InvalidRequestError(f"there is no tool {call.name!r}; there are {', '.join(rows)}, doctor")
        except ArtError as error:
            return types.CallToolResult(content=[types.TextContent(text=error.message)], is_error=True)
        return types.CallToolResult(content=[types.TextContent(text=text)])

    return Server("art", version=art.__version__, instructions=HOW, on_list_tools=list_tools, on_call_tool=call_tool)


def path_of(row: ReadPath, arguments: Mapping[str, Any]) -> str:
    """Return the path with its query that asks for the same as a tool's arguments."""
    names = _names_in(row.path)
    if missing := [name for name in names if name not in arguments]:
        raise InvalidRequestError(f"`{missing[0]}` is missing; {row.method.__name__} needs {', '.join(names)}")
    path = row.path.format(**{name: quote(str(arguments[name]), safe="") for name in names})
    query = urlencode({name: value for name, value in arguments.items() if name not in names}, doseq=True)
    return f"{path}?{query}" if query else path


def _names_in(path: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", path)


def _tool(row: ReadPath) -> Tool:
    """Describe a tool by the path that it reads: its names and numbers, and the fields of its query."""
    from art_page.page import NUMBERS

    schema = row.query.model_json_schema()
    named = {name: {"type": "integer" if name in NUMBERS else "string"} for name in _names_in(row.path)}
    schema["properties"] = named | schema.get("properties", {})
    schema["required"] = [*named, *schema.get("required", [])]
    return _describe(row.method.__name__, f"{row.summary[0].upper()}{row.summary[1:]}.", schema)


def _doctor_tool() -> Tool:
    properties = {
        "model": {"type": "string", "description": "base model: hub id or local path"},
        "task": {"type": "string", "enum": list_tasks(), "description": "also look at the rewards of this ready task"},
    }
    what = "Check everything that training a base model needs, by a trial step that keeps nothing. It takes minutes."
    return _describe("doctor", what, {"type": "object", "properties": properties, "required": ["model"]})


def _describe(name: str, description: str, schema: dict[str, Any]) -> Tool:
    from mcp.types import Tool, ToolAnnotations

    hints = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
    return Tool(name=name, description=description, input_schema=schema, annotations=hints)


def examine(arguments: Mapping[str, Any]) -> str:
    """Run `art doctor` in a process of its own and return its numbers as JSON, whether or not a check fails.

    Raises:
        InvalidRequestError: no model is named, or the task is none of the ready ones, whose code alone may run.
        ConfigError: the checks could not be made.
    """
    model, task = arguments.get("model"), arguments.get("task")
    if not isinstance(model, str) or not model:
        raise InvalidRequestError("`model` is missing: a hub id or the path of a base model", param="model")
    if task is not None and task not in list_tasks():
        raise InvalidRequestError(f"`task` must be one of {', '.join(list_tasks())}, got {task!r}", param="task")
    with tempfile.TemporaryDirectory(prefix="art-mcp-") as folder:
        file = Path(folder, "doctor.json")
        options = ["--json", str(file), *(["--task", task] if task else []), "--", model]
        command = [sys.executable, "-m", "art.cli.main", "doctor", *options]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if not file.exists():
            raise ConfigError(f"art doctor {model}: {done.stderr.strip()}")
        return file.read_text(encoding="utf-8")
