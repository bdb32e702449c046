"""Agents that act through an MCP server: a client, scenarios written from its tools, and a ready rollout.

    scenarios = await generate_scenarios(num_scenarios=24, server_url="http://127.0.0.1:8000/mcp")
    train, val = scenarios.split_by_hash(val_fraction=0.25)
    trajectory = await mcp_rollout(model, train[0], "http://127.0.0.1:8000/mcp")

The official SDK (extra `mcp`) is imported when a client connects, not before.
"""

from art_recipes.mcp.client import MCPClient, ToolResult
from art_recipes.mcp.generate_scenarios import generate_scenarios
from art_recipes.mcp.rollout import McpTask, mcp_rollout
from art_recipes.mcp.types import (
    GeneratedScenario,
    GeneratedScenarioCollection,
    MCPResource,
    MCPTool,
    complete_task_tool,
)

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
