"""A ready rollout: the agent is told a task, calls the server's tools turn by turn, and says when it is done.

`McpTask` makes a task of a server, with scenarios written for its tools. A judge gives the reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from art.errors import ConfigError, ContextLengthError
from art.task import Scenario, Split, Task, TaskDefaults, derive_seed, describe_messages, take_turn
from art.trajectory import Trajectory, cancel_and_wait
from art_recipes.mcp.client import MCPClient, ToolResult, is_address
from art_recipes.mcp.types import GeneratedScenario, MCPTool, complete_task_tool

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
        max_result_chars: longest result of a tool; a longer one is cut.
        request: more arguments of each request: `temperature`, `max_completion_tokens`, ...

    Raises:
        ConfigError: the tools' descriptions and the task do not fit the model's context.
        ToolServerError: the server is gone. A gather drops the rollout as an `infra_fault`; it never gets a reward of
            0. A tool that fails or is late does not raise: the model reads about it.
    """
    if max_turns < 1 or max_result_chars < 1:
        raise ConfigError(f"limits must be 1 or more, got {max_turns=}, {max_result_chars=}")
    async with contextlib.AsyncExitStack() as stack:
        client = server if isinstance(server, MCPClient) else await stack.enter_async_context(MCPClient(server))
        named = name_tools(await client.list_tools() if tools is None else tools)
        toolbox = _Toolbox(client=client, tools=named, max_result_chars=max_result_chars)
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


ROLLOUT_HEADER = "x-rollout-id"
"""HTTP header with an id of the rollout, on each of its requests, by which a server can keep rollouts apart."""


class McpTask(Task):
    """A task: use the tools of an MCP server to do what a scenario says. A judge sets the reward.

    Example:
        scenarios = await generate_scenarios(num_scenarios=36, server_url=SERVER)
        train, held_out = scenarios.split(24)
        task = McpTask(SERVER, train=train, held_out=held_out)
        await train_task(model, task, task.defaults, num_steps=20, seed=0, on_step=print, score=scorer)
    """

    name: ClassVar[str] = "mcp"
    description: ClassVar[str] = "use the tools of an MCP server"
    headline_metric: ClassVar[str] = "completed"
    needs_judge: ClassVar[bool] = True
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_steps=20, groups_per_step=8, rollouts_per_group=6, num_minibatches=1, schedule="constant"
    )

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        train: Sequence[GeneratedScenario],
        held_out: Sequence[GeneratedScenario],
        tools: Sequence[MCPTool] | None = None,
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        max_turns: int = 10,
        max_concurrent: int = 16,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            server: address of an MCP server, or a command that is started for each rollout.
            train, held_out: scenarios of the splits `train` and `test`.
            tools: tools that the agent may use; by default all that the server lists.
            headers: headers of HTTP requests to an address.
            env: environment variables of a command.
            max_turns: answers of the model in a rollout.
            max_concurrent: rollouts at once, each with its own connection or process.
            request: more arguments of each request to the model: `temperature`, `max_completion_tokens`, ...
        """
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be 1 or more, got {max_concurrent}")
        self.server, self.tools = server, tools
        self._pools: dict[Split, Sequence[GeneratedScenario]] = {"train": train, "test": held_out}
        self._headers, self._env = dict(headers or {}), dict(env or {})
        self._max_turns, self._request = max_turns, dict(request or {})
        self._gate = asyncio.Semaphore(max_concurrent)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Choose `count` scenarios: those to train on in an order by the seed, those to test with in their own order.

        If `count` is larger than the number of scenarios, they repeat.
        """
        pool = list(self._pools.get(split, ()))
        if not pool:
            raise ConfigError(f"there are no scenarios of the split {split!r}; an MCP task has 'train' and 'test'")
        rng = random.Random(derive_seed(self.name, split, seed))
        chosen: list[GeneratedScenario] = []
        while len(chosen) < count:
            chosen += rng.sample(pool, len(pool)) if split == "train" else pool
        return [self.scenario(split, seed, index, item.to_dict()) for index, item in enumerate(chosen[:count])]

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        """Make one rollout, over a connection of its own. The reward stays 0, for a judge to set.

        Raises:
            ToolServerError: the server is gone, which is an `infra_fault` and never a reward of 0.
        """
        headers = {**self._headers, ROLLOUT_HEADER: uuid.uuid4().hex} if is_address(self.server) else None
        async with self._gate, MCPClient(self.server, headers=headers, env=self._env) as client:
            return await mcp_rollout(
                model, GeneratedScenario(**scenario.inputs), client, step=step, max_turns=self._max_turns,
                tools=self.tools, request={"seed": derive_seed(scenario.seed, rollout_index), **self._request},
            )  # fmt: skip

    def prompt_scenario(self, prompt: str) -> Scenario:
        inputs = {"task": prompt, "difficulty": 1}
        return Scenario(id=f"{self.name}/prompt", seed=derive_seed(prompt), inputs=inputs)

    def render_trajectory(self, trajectory: Trajectory) -> str:
        lines = describe_messages(trajectory.messages()[1:])
        return "\n".join([*lines, f"{trajectory.metadata.get('ending')}, reward {trajectory.reward:g}"])
