"""Agents that act through an MCP server: a client, scenarios written from its tools, and a ready rollout.

    scenarios = await generate_scenarios(num_scenarios=24, server_url="http://127.0.0.1:8000/mcp")
    train, val = scenarios.split_by_hash(val_fraction=0.25)
    trajectory = await mcp_rollout(model, train[0], "http://127.0.0.1:8000/mcp")

The official SDK (extra `mcp`) is imported when a client connects, not before.
"""

from art.mcp.client import MCPClient, ToolResult
from art.mcp.collection import GeneratedScenarioCollection
from art.mcp.generate_scenarios import generate_scenarios
from art.mcp.rollout import mcp_rollout
from art.mcp.task import McpTask
from art.mcp.types import GeneratedScenario, MCPResource, MCPTool, complete_task_tool

__all__ = [
    "GeneratedScenario",
    "GeneratedScenarioCollection",
    "MCPClient",
    "MCPResource",
    "MCPTool",
    "McpTask",
    "ToolResult",
    "complete_task_tool",
    "generate_scenarios",
    "mcp_rollout",
]
