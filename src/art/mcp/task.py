"""An MCP server as a task: scenarios written for its tools, and rollouts that use them. A judge gives the reward."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from art.errors import ConfigError
from art.mcp.client import MCPClient, is_address
from art.mcp.rollout import mcp_rollout
from art.mcp.types import GeneratedScenario, MCPTool
from art.task import Scenario, Split, Task, TaskDefaults, derive_seed, describe_messages
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model

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
