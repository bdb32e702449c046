"""A task with an MCP server over SQLite: answer questions about the stock of a shop, and change it.

    user       Set the price of P-314 to 45.
    assistant  set_price(sku="P-314", price=45)        tool  {"sku": "P-314", ..., "price": 45.0, ...}
    assistant  complete_task(summary="45.0")           reward 1

Each scenario has a shop of its own: products, prices and stocks are drawn with the job.
"""

from __future__ import annotations

import random
import sqlite3
from typing import Any, ClassVar

from art.tasks.desks import inventory_jobs
from art.tasks.desks.cases import Case
from art.tasks.desks.desk_jobs import Job
from art.tasks.desks.local_server import LocalServer
from art.tasks.desks.server_task import ServerTask


class Inventory(ServerTask):
    """A task: answer questions about a shop's stock, and change it, with the seven tools of an MCP server.

    A tiny model does jobs of one call; plans of several calls are beyond it.
    """

    name: ClassVar[str] = "inventory"
    description: ClassVar[str] = "answer questions about a shop's stock, and change it, with the tools of an MCP server"
    rubric: ClassVar[str | None] = (
        "A good rollout does exactly what the user asks about the shop's stock: it makes the change that was asked for "
        "and no other, with the right product and number, or looks the answer up. It ends with complete_task and a "
        "summary that states the result which the tools returned, such as the price or the stock, in few words. Calls "
        "that fail or are not needed make it worse. A wrong change is worse than no change, an answer that no tool "
        "result supports is a guess, and a rollout without complete_task is worst."
    )
    server: ClassVar[LocalServer] = LocalServer("inventory_server", states="shops")

    def draw_case(self, rng: random.Random, max_difficulty: int) -> Case:
        return inventory_jobs.draw_case(rng, max_difficulty)

    def open_state(self, rows: list[dict[str, Any]]) -> sqlite3.Connection:
        shop: sqlite3.Connection = self.server.module.open_shop([tuple(row.values()) for row in rows])
        return shop

    def rows_of(self, state: sqlite3.Connection) -> list[dict[str, Any]]:
        return [dict(row) for row in state.execute("SELECT * FROM products ORDER BY sku")]

    def read_job(self, task: str, messages: list[dict[str, Any]]) -> Job | None:
        return inventory_jobs.read_job(task)
