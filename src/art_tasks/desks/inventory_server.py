"""An MCP server with the inventory of a small shop, in SQLite.

`python -m art_tasks.desks.inventory_server` uses stdio, with `--http` HTTP.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError  # the text of other errors does not reach the agent

from art_tasks.desks.rollout_states import RolloutStates

Product = tuple[str, str, str, float, int, int]
"""SKU, name, category, price, stock, and the stock at which to order more."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS products (
    sku TEXT PRIMARY KEY, name TEXT NOT NULL, category TEXT NOT NULL,
    price REAL NOT NULL, stock INTEGER NOT NULL CHECK (stock >= 0), reorder_at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS movements (
    id INTEGER PRIMARY KEY, sku TEXT NOT NULL REFERENCES products, change INTEGER NOT NULL, reason TEXT NOT NULL
);
"""
PRODUCTS: list[Product] = [
    ("P-100", "oak desk", "furniture", 420.0, 4, 3),
    ("P-101", "pine shelf", "furniture", 89.0, 17, 5),
    ("P-102", "office chair", "furniture", 179.0, 2, 6),
    ("P-200", "desk lamp", "lighting", 35.5, 40, 10),
    ("P-201", "floor lamp", "lighting", 99.0, 0, 4),
    ("P-300", "notebook", "paper", 3.2, 310, 100),
    ("P-301", "envelopes, 50", "paper", 6.9, 75, 80),
    ("P-302", "printer paper, 500", "paper", 7.5, 12, 40),
]

server = MCPServer(
    "inventory", instructions="The stock of a shop. Products have a SKU such as P-100.", log_level="WARNING"
)
lock = threading.RLock()  # tools run in threads


def open_shop(products: Sequence[Product] = PRODUCTS) -> sqlite3.Connection:
    """Make a database in memory, filled with products."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.executescript(SCHEMA)
    connection.executemany("INSERT INTO products VALUES (?, ?, ?, ?, ?, ?)", products)
    connection.commit()
    return connection


states: RolloutStates[sqlite3.Connection] = RolloutStates(open_shop)


def rows(query: str, *values: Any) -> list[dict[str, Any]]:
    with lock:
        return [dict(row) for row in states.current().execute(query, values)]


@server.tool()
def list_products(category: str | None = None) -> list[dict[str, Any]]:
    """All products, or those of a category."""
    return rows("SELECT * FROM products WHERE ?1 IS NULL OR category = ?1 ORDER BY sku", category)


@server.tool()
def search_products(text: str) -> list[dict[str, Any]]:
    """Products whose name contains the text."""
    return rows("SELECT * FROM products WHERE instr(lower(name), lower(?)) ORDER BY sku", text)


@server.tool()
def get_product(sku: str) -> dict[str, Any]:
    """One product: name, category, price, stock, and the stock at which to order more."""
    products = rows("SELECT * FROM products WHERE sku = ?", sku)
    if not products:
        raise ToolError(f"there is no product {sku}")
    return products[0]


@server.tool()
def list_low_stock() -> list[dict[str, Any]]:
    """Products whose stock is at or below the level at which to order more."""
    return rows("SELECT * FROM products WHERE stock <= reorder_at ORDER BY sku")


@server.tool()
def change_stock(sku: str, change: int, reason: str) -> dict[str, Any]:
    """Add to the stock of a product, or take from it with a negative change. The stock cannot go below 0."""
    product = get_product(sku)
    with lock, states.current() as connection:
        update = connection.execute(
            "UPDATE products SET stock = stock + ?1 WHERE sku = ?2 AND stock + ?1 >= 0", (change, sku)
        )
        if not update.rowcount:
            raise ToolError(f"{sku} has a stock of {product['stock']}; it cannot change by {change}")
        connection.execute("INSERT INTO movements (sku, change, reason) VALUES (?, ?, ?)", (sku, change, reason))
    return get_product(sku)


@server.tool()
def set_price(sku: str, price: float) -> dict[str, Any]:
    """Set the price of a product."""
    get_product(sku)
    if price <= 0:
        raise ToolError(f"a price is above 0, not {price}")
    with lock, states.current() as connection:
        connection.execute("UPDATE products SET price = ? WHERE sku = ?", (price, sku))
    return get_product(sku)


@server.tool()
def list_movements(sku: str) -> list[dict[str, Any]]:
    """What was added to the stock of a product and taken from it, and why; the oldest first."""
    get_product(sku)
    return rows("SELECT change, reason FROM movements WHERE sku = ? ORDER BY id", sku)


@server.resource("inventory://categories", description="The categories of products", mime_type="text/plain")
def categories() -> str:
    return "\n".join(row["category"] for row in rows("SELECT DISTINCT category FROM products ORDER BY category"))


def main() -> None:
    states.serve(server, __doc__, 8020)


if __name__ == "__main__":
    main()
