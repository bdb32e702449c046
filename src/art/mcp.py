"""The path of `art_recipes.mcp` in the programs of users: agents that act through an MCP server."""

from art_recipes.mcp import *  # noqa: F403
from art_recipes.mcp import __all__ as __all__
