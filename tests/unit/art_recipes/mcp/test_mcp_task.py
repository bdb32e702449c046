"""An MCP server as a task: its scenarios, and rollouts that do not get into each other's way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from art.errors import ConfigError
from art.recipes import train
from art.task import Scenario
from art_recipes.mcp import GeneratedScenario, MCPClient, McpTask
from art_recipes.mcp.rollout import ROLLOUT_HEADER

TRAIN = [GeneratedScenario(f"task {i}", 1 + i % 5) for i in range(6)]
HELD_OUT = [GeneratedScenario(f"test {i}", 3) for i in range(3)]
DONE = [("complete_task", '{"summary": "done"}')]


def tasks_of(scenarios: list[Scenario]) -> list[str]:
    return [scenario.inputs["task"] for scenario in scenarios]


def test_scenarios_to_train_on_are_drawn_without_repeating() -> None:
    task = McpTask("server", train=TRAIN, held_out=HELD_OUT)
    four = task.scenarios("train", seed=7, count=4)
    assert four == task.scenarios("train", seed=7, count=4)
    assert len(set(tasks_of(four))) == 4
    assert sorted(tasks_of(task.scenarios("train", seed=7, count=12))) == sorted(s.task for s in TRAIN * 2)
    assert {tuple(tasks_of(task.scenarios("train", seed=seed, count=4))) for seed in range(8)}.__len__() > 4
    seeds = [s.seed for seed in range(4) for s in task.scenarios("train", seed=seed, count=12)]
    assert len(set(seeds)) == len(seeds), "each rollout draws random numbers of its own"


def test_held_out_scenarios_come_in_their_order_and_are_never_trained_on() -> None:
    task = McpTask("server", train=TRAIN, held_out=HELD_OUT)
    assert tasks_of(task.scenarios("test", seed=5, count=4)) == ["test 0", "test 1", "test 2", "test 0"]
    with pytest.raises(ConfigError, match="'val'; an MCP task has 'train' and 'test'"):
        task.scenarios("val", seed=0, count=1)
    with pytest.raises(ConfigError, match="max_concurrent must be 1 or more, got 0"):
        McpTask("server", train=TRAIN, held_out=HELD_OUT, max_concurrent=0)


async def test_a_task_whose_rewards_are_all_0_is_not_trained_without_a_judge() -> None:
    with pytest.raises(ConfigError, match="'mcp' has no reward of its own: say who judges by --judge"):
        await train(McpTask("server", train=TRAIN, held_out=HELD_OUT), "./tiny")


async def test_a_rollout_over_http_has_a_shop_of_its_own(scripted: Callable[..., Any], inventory_url: str) -> None:
    """Two rollouts of the same server, one after the other: the second does not see what the first has sold."""
    sell = [("change_stock", '{"sku": "P-100", "change": -1, "reason": "sale"}')]
    model = scripted([sell, DONE, sell, DONE])
    task = McpTask(inventory_url, train=TRAIN, held_out=HELD_OUT, max_turns=3, request={"temperature": 0.5})
    (scenario,) = task.scenarios("train", seed=0, count=1)
    rollouts = [await task.rollout(model.model(), scenario, rollout_index=i) for i in range(2)]
    stocks = [json.loads(next(m["content"] for m in t.messages() if m["role"] == "tool"))["stock"] for t in rollouts]  # type: ignore[typeddict-item,arg-type]
    assert stocks == [3, 3]
    assert rollouts[0].metadata["difficulty"] == scenario.inputs["difficulty"]
    first, _, second, _ = model.requests
    assert first["temperature"] == 0.5
    assert first["seed"] != second["seed"], "rollouts of one group differ"
    assert "reward" in task.render_trajectory(rollouts[0])
    assert 'change_stock {"sku": "P-100"' in task.render_trajectory(rollouts[0])


async def test_only_the_tools_that_are_given(scripted: Callable[..., Any], inventory_url: str) -> None:
    async with MCPClient(inventory_url, headers={ROLLOUT_HEADER: "x"}) as client:
        tools = [tool for tool in await client.list_tools() if tool.name == "get_product"]
    model = scripted([[("set_price", '{"sku": "P-100", "price": 1}')], DONE])
    task = McpTask(inventory_url, train=TRAIN, held_out=HELD_OUT, tools=tools)
    trajectory = await task.rollout(model.model(), task.scenarios("train", seed=0, count=1)[0])
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["get_product", "complete_task"]
    assert trajectory.metrics["num_tool_errors"] == 1, "a tool that was not offered cannot be called"
