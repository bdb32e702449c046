"""The ready rollout: a scripted model and real servers, most of them in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import art
from art.errors import ConfigError, ToolServerError
from art_recipes.mcp import GeneratedScenario, MCPClient, MCPTool, mcp_rollout
from art_recipes.mcp.rollout import name_tools, require_fit
from art_tasks.desks import inventory_server

DONE = [("complete_task", '{"summary": "done"}')]


async def test_a_task_is_done_in_turns(scripted: Callable[..., Any], inventory: list[str]) -> None:
    both = [("get_product", '{"sku": "P-100"}'), ("get_product", '{"sku": "P-200"}')]
    sell = [("change_stock", '{"sku": "P-100", "change": -1, "reason": "sale"}'), *DONE]
    model = scripted([both, sell])
    trajectory = await mcp_rollout(
        model.model(), GeneratedScenario("Sell a desk.", 2), inventory, request={"temperature": 0.7}
    )
    assert trajectory.metadata == {"scenario": "Sell a desk.", "difficulty": 2, "outcome": "ok", "ending": "completed"}
    numbers = {key: trajectory.metrics[key] for key in ("completed", "num_turns", "num_tool_calls", "num_tool_errors")}
    assert numbers == {"completed": 1.0, "num_turns": 2, "num_tool_calls": 3, "num_tool_errors": 0}
    assert trajectory.metrics["tools_duration"] > 0
    assert trajectory.reward == 0
    first, second = model.requests
    assert [tool["function"]["name"] for tool in first["tools"]][-1] == "complete_task"
    assert first["temperature"] == 0.7
    answers: list[Any] = second["messages"][-2:]
    assert [(a["tool_call_id"], json.loads(a["content"])["name"]) for a in answers] == [
        ("call_0", "oak desk"),
        ("call_1", "desk lamp"),
    ]
    last: Any = trajectory.messages()[-1]
    assert json.loads(last["content"])["stock"] == 3  # what is called together with complete_task is done


async def test_errors_are_read_by_the_model(scripted: Callable[..., Any]) -> None:
    wrong = [
        ("get_product", '{"sku": "P-9"}'),
        ("get_product", '{"sku": '),
        ("get_product", "[1]"),
        ("fly", "{}"),
        ("list_products", ""),
    ]
    model = scripted([wrong, "I give up."])
    async with MCPClient(inventory_server.server) as client:
        trajectory = await mcp_rollout(model.model(), "Look.", client, max_result_chars=100)
    texts = [message["content"] for message in model.requests[1]["messages"][-5:]]
    assert "no product P-9" in texts[0]
    assert "are not JSON" in texts[1]
    assert "JSON object" in texts[2]
    assert "fly" in texts[3]
    assert all(text.startswith("Error: ") for text in texts[:4])
    assert texts[4].endswith("more characters]")
    assert len(texts[4]) < 140
    assert trajectory.metrics["num_tool_errors"] == 4
    assert trajectory.metadata["ending"] == "answered"
    assert trajectory.metadata["outcome"] == "ok"
    assert trajectory.metrics["completed"] == 0


async def test_what_the_policy_spoils(scripted: Callable[..., Any]) -> None:
    call = [("list_low_stock", "{}")]
    cut = {"message": {"role": "assistant", "content": "well"}, "finish_reason": "length"}
    full = (400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
    model = scripted([call, call, cut, call, full, full])
    async with MCPClient(inventory_server.server) as client:  # shared by these rollouts
        ends = [await mcp_rollout(model.model(), "Look.", client, max_turns=2) for _ in range(3)]
        with pytest.raises(Exception, match="too long"):  # a task that is too long is not the policy's fault
            await mcp_rollout(model.model(), "Look.", client)
    assert [t.metadata["ending"] for t in ends] == ["out_of_turns", "cut_short", "context_full"]
    assert {t.metadata["outcome"] for t in ends} == {"policy_fault"}
    kinds = ("out_of_turns", "cut_short", "context_full")
    assert [[t.metrics[kind] for kind in kinds] for t in ends] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


async def test_tools_that_do_not_fit_are_found_with_one_token(scripted: Callable[..., Any]) -> None:
    full = (400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
    model = scripted(["yes", full])
    tools = [MCPTool("get_product", "One product."), MCPTool("sell", "Sell it.")]
    await require_fit(model.model(), tools)
    assert model.requests[0]["max_completion_tokens"] == 1
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["get_product", "sell", "complete_task"]
    with pytest.raises(ConfigError, match=r"descriptions of 2 tools.*--tools"):
        await require_fit(model.model(), tools)


async def test_a_server_that_fails_ends_the_rollout_and_not_the_gather(
    scripted: Callable[..., Any], limited_url: str
) -> None:
    model = scripted([[("look", "{}")], "No tools needed."])
    headers = {"Authorization": "Bearer right"}

    async def rollout() -> art.Trajectory:
        async with MCPClient(limited_url, headers=headers) as client:
            return await mcp_rollout(model.model(), "Go.", client)

    pending = art.TrajectoryGroup(rollout() for _ in range(2))
    faults = art.FaultWatch()
    (group,) = await art.gather_trajectory_groups([pending], faults=faults)
    assert [error.type for error in group.exceptions] == [ToolServerError.__name__]
    assert faults.metrics() == {"data/infra_fault_rate": 0.5, "data/infra_faults/tool_server": 1}
    assert [trajectory.metadata["ending"] for trajectory in group] == ["answered"]


async def test_limits_are_checked(inventory: list[str]) -> None:
    with pytest.raises(ConfigError, match="max_turns=0"):
        await mcp_rollout(art.Model(name="m", project="p"), "Go.", inventory, max_turns=0)


def test_names_are_those_that_functions_may_have() -> None:
    tools = [MCPTool(name, "") for name in ("files/read", "files.read", "complete_task", "ok-1", "x" * 80, "x" * 70)]
    named = name_tools(tools)
    assert list(named) == [
        "files_read", "files_read_2", "complete_task_2", "ok-1", "x" * 64, "x" * 62 + "_2"
    ]  # fmt: skip
    assert [tool.name for tool in named.values()] == [tool.name for tool in tools]
