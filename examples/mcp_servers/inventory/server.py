"""An MCP server over SQLite: the inventory of a small shop. `python server.py` uses stdio, `--http` HTTP.

The server is part of ART, for the task `inventory`: src/art_tasks/desks/inventory_server.py.
"""

from art_tasks.desks.inventory_server import main

if __name__ == "__main__":
    main()
