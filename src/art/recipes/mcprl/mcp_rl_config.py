"""Settings of MCP-RL, the recipe that trains an agent for the tools of an MCP server."""

from __future__ import annotations

from pydantic import Field

from art.recipes.judged.judged_config import JudgedConfig


class McpRlConfig(JudgedConfig):
    """Settings of `art.recipes.mcp_rl`, which trains an agent for an MCP server."""

    project: str = "mcp-rl"
    """Project of the trained model."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of each HTTP request to the server."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for a server that is a command, beside PATH, HOME and the like."""
    tools: tuple[str, ...] | None = None
    """Names of the tools that the agent may use; by default every tool."""
    max_turns: int = 10
    """Most answers of the model in a rollout."""
    max_completion_tokens: int | None = None
    """Most tokens of one answer; by default what fits the context."""
    max_concurrent: int = Field(default=16, ge=1)
    """Rollouts at once, each with its own connection or process."""
    num_scenarios: int = Field(default=24, ge=1)
    """Scenarios to train on."""
    held_out: int = Field(default=12, ge=1)
    """Scenarios to test with."""
    instructions: str | None = None
    """What the scenarios should be about, in your words."""
    rubric: str | None = None
    """What the judge is told is good, in prose; by default `art.rewards.DEFAULT_RUBRIC`."""
