"""A ready rollout: the agent is told a task, calls the server's tools turn by turn, and says when it is done."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from art.errors import ConfigError, ContextLengthError
from art.mcp.client import MCPClient, ToolResult
from art.mcp.types import GeneratedScenario, MCPTool, complete_task_tool
from art.task import take_turn
from art.trajectory import Trajectory, cancel_and_wait

if TYPE_CHECKING:
    from art.model import Model
    from art.protocol.rollouts import Outcome

SYSTEM = (
    "You solve the user's task with tools. Call complete_task when it is done, or when you see that it cannot be done."
)
COMPLETE = complete_task_tool["function"]["name"]
MAX_NAME = 64
"""Longest name of a function that OpenAI's API allows."""
_ENDINGS: dict[str, Outcome] = {
    "completed": "ok",  # called `complete_task`
    "answered": "ok",  # answered without a call
    "out_of_turns": "policy_fault",
    "cut_short": "policy_fault",  # gave an answer that was longer than allowed
    "context_full": "policy_fault",
}


@dataclass(slots=True, kw_only=True)
class _Toolbox:
    """The tools of one rollout."""

    client: MCPClient
    tools: dict[str, MCPTool]
    """Tools by the names that the model sees."""
    gate: asyncio.Semaphore
    max_result_chars: int

    async def call(self, name: str, arguments: str) -> ToolResult:
        tool = self.tools.get(name)
        if tool is None:
            return ToolResult(text=f"there is no tool {name}; there are {', '.join(self.tools)}", is_error=True)
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return ToolResult(text=f"the arguments of {name} are not JSON: {error}", is_error=True)
        if not isinstance(values, dict):
            return ToolResult(text=f"the arguments of {name} must be a JSON object", is_error=True)
        async with self.gate:
            result = await self.client.call_tool(tool.name, values)
        if len(result.text) <= self.max_result_chars:
            return result
        cut = f"{result.text[: self.max_result_chars]}\n[{len(result.text) - self.max_result_chars} more characters]"
        return ToolResult(text=cut, is_error=result.is_error)


async def mcp_rollout(
    model: Model[Any, Any],
    scenario: GeneratedScenario | str,
    server: MCPClient | str | Sequence[str],
    *,
    step: int | None = None,
    tools: Sequence[MCPTool] | None = None,
    max_turns: int = 10,
    max_parallel_calls: int = 8,
    max_result_chars: int = 8000,
    system_prompt: str = SYSTEM,
    request: Mapping[str, Any] | None = None,
) -> Trajectory:
    """Make one rollout: the model does what a scenario says with an MCP server's tools.

    The reward stays 0 for a judge to set (`art.rewards`), even if the policy was at fault.
    Metrics: `completed`, `num_turns`, `num_tool_calls`, `num_tool_errors`, `tools_duration` in seconds, and 1 or 0 for
    `out_of_turns`, `cut_short` and `context_full`. Metadata: `scenario`, `difficulty`, `outcome` (`ok` or
    `policy_fault`), and `ending`: `completed`, `answered` (without `complete_task`), `out_of_turns`, `cut_short` (an
    answer was too long) or `context_full`.

    Args:
        scenario: the scenario, or only its task.
        server: an address or a command, to which this rollout opens its own connection; or a connected client, which
            rollouts can share. A command starts in the same state for each rollout, so that rollouts are comparable.
        step: checkpoint to act with; `None` is the newest.
        tools: tools that the agent may use; by default all that the server lists.
        max_turns: most answers of the model.
        max_parallel_calls: most calls of one answer that run at once.
        max_result_chars: longest result of a tool; a longer one is cut.
        request: more arguments of each request: `temperature`, `max_completion_tokens`, ...

    Raises:
        ConfigError: the tools' descriptions and the task do not fit the model's context.
        ToolServerError: the server is gone. A gather drops the rollout as an `infra_fault`; it never gets a reward of
            0. A tool that fails or is late does not raise: the model reads about it.
    """
    if max_turns < 1 or max_parallel_calls < 1 or max_result_chars < 1:
        raise ConfigError(f"limits must be 1 or more, got {max_turns=}, {max_parallel_calls=}, {max_result_chars=}")
    async with contextlib.AsyncExitStack() as stack:
        client = server if isinstance(server, MCPClient) else await stack.enter_async_context(MCPClient(server))
        named = name_tools(await client.list_tools() if tools is None else tools)
        toolbox = _Toolbox(
            client=client, tools=named, gate=asyncio.Semaphore(max_parallel_calls), max_result_chars=max_result_chars
        )
        trajectory = _open(scenario, system_prompt, named)
        for _ in range(max_turns):
            ending = await _turn(model, trajectory, toolbox, step, request or {})
            if ending is not None:
                break
    ending = ending or "out_of_turns"
    trajectory.metrics["completed"] = float(ending == "completed")
    trajectory.metrics |= {name: float(ending == name) for name, outcome in _ENDINGS.items() if outcome != "ok"}
    trajectory.metadata |= {"outcome": _ENDINGS[ending], "ending": ending}
    return trajectory.finish()


def name_tools(tools: Sequence[MCPTool]) -> dict[str, MCPTool]:
    """Give each tool a unique name that OpenAI's API allows for a function: at most 64 letters, digits, _ and -."""
    named: dict[str, MCPTool] = {}
    for tool in tools:
        plain = re.sub(r"[^a-zA-Z0-9_-]", "_", tool.name)[:MAX_NAME]
        name, number = plain, 1
        while name in named or name == COMPLETE:
            number += 1
            name = f"{plain[: MAX_NAME - len(str(number)) - 1]}_{number}"
        named[name] = tool
    return named


def _open(scenario: GeneratedScenario | str, system_prompt: str, tools: Mapping[str, MCPTool]) -> Trajectory:
    task = scenario if isinstance(scenario, str) else scenario.task
    schemas = [replace(tool, name=name).to_tool_schema() for name, tool in tools.items()]
    trajectory = Trajectory(
        messages_and_choices=[{"role": "system", "content": system_prompt}, {"role": "user", "content": task}],
        tools=[*schemas, complete_task_tool],
        metadata={"scenario": task},
        metrics={"num_turns": 0, "num_tool_calls": 0, "num_tool_errors": 0},
    )
    if not isinstance(scenario, str):
        trajectory.metadata["difficulty"] = scenario.difficulty
    return trajectory


async def require_fit(model: Model[Any, Any], tools: Sequence[MCPTool]) -> None:
    """Check that the descriptions of tools fit the model's context, by asking it for one token.

    Raises:
        ConfigError: the descriptions of the tools do not fit.
    """
    with _fitting(len(tools)):
        await take_turn(model, _open("Say yes.", SYSTEM, name_tools(tools)), max_completion_tokens=1)


@contextlib.contextmanager
def _fitting(num_tools: int) -> Iterator[None]:
    """Turn a first prompt that is too long into a `ConfigError`, since it would be for every rollout."""
    try:
        yield
    except Exception as error:
        if getattr(error, "code", None) != ContextLengthError.code:
            raise
        raise ConfigError(
            f"the descriptions of {num_tools} tools and a task do not fit the model's context; leave some out "
            f"with --tools (or `tools=`), raise --max-context, or take another model. The model's server says: {error}"
        ) from error


async def _turn(
    model: Model[Any, Any], trajectory: Trajectory, toolbox: _Toolbox, step: int | None, request: Mapping[str, Any]
) -> str | None:
    """Take one answer and make its calls. Returns how the rollout ended, or `None`."""
    with _fitting(len(toolbox.tools)):
        calls = await take_turn(model, trajectory, step=step, **request)
    if isinstance(calls, str):
        return calls
    if not calls:
        return "answered"
    asked = [call for call in calls if call.function.name != COMPLETE]
    async with trajectory.track_duration("tools"):
        functions = [call.function for call in asked]
        calls_made = [asyncio.ensure_future(toolbox.call(f.name, f.arguments)) for f in functions]
        try:
            results = await asyncio.gather(*calls_made)
        finally:
            await cancel_and_wait(calls_made)
    for call, result in zip(asked, results, strict=True):
        text = f"Error: {result.text}" if result.is_error else result.text
        trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": text})
    trajectory.metrics["num_tool_calls"] += len(asked)
    trajectory.metrics["num_tool_errors"] += sum(result.is_error for result in results)
    return "completed" if len(asked) < len(calls) else None
