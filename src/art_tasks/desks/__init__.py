"""Agents that use an MCP server: `*_task.py` have the tasks, `*_server.py` the servers, `*_jobs.py` what is asked."""
