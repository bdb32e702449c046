"""Recipes on top of the core: training from a sentence or an MCP server, comparisons, reports."""
