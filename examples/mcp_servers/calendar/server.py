"""An MCP server in memory: a calendar of one week. `python server.py` uses stdio, `--http` HTTP.

The server is part of ART, for the task `calendar`: src/art_tasks/desks/calendar_server.py.
"""

from art_tasks.desks.calendar_server import main

if __name__ == "__main__":
    main()
