"""Jobs for the inventory: questions and changes about the products of a shop, drawn with the shop from a seed."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from art_tasks.desks.server_task import RUBRIC, Call, Case, DeskJob, LocalServer, ServerTask, field_job, planned_job

LOOKUPS = (
    ("What is the price of {}?", "price", "stock"),
    ("How many of {} are in stock?", "stock", "reorder_at"),
    ("Which category is {} in?", "category", "name"),
)
"""Questions about a product, with the field that answers and the one that a beginner reads."""
MOVEMENTS = (("{} of {} have arrived.", 1, "arrived"), ("We sold {} of {}.", -1, "sold"))
_CATALOGUE = {
    "furniture": ["oak desk", "pine shelf", "office chair", "bar stool", "coat rack", "side table"],
    "lighting": ["desk lamp", "floor lamp", "wall light", "string lights", "reading lamp"],
    "paper": ["notebook", "envelopes", "printer paper", "sketch pad", "index cards", "labels"],
    "kitchen": ["kettle", "tea pot", "bread knife", "egg timer", "soup bowl"],
}
_FIELDS = ("sku", "name", "category", "price", "stock", "reorder_at")
Shop = list[dict[str, Any]]


def lookup(sku: str, question: tuple[str, str, str], skus: Sequence[str]) -> DeskJob:
    task, field, other = question
    slips = [("get_product", {"sku": wrong}) for wrong in skus if wrong != sku]
    return field_job(task.format(sku), 1, ("get_product", {"sku": sku}), field, other, slips)


def new_price(sku: str, price: int, skus: Sequence[str]) -> DeskJob:
    slips: list[Call] = [("set_price", {"sku": sku, "price": price + 10}), ("get_product", {"sku": sku})]
    slips += [("set_price", {"sku": wrong, "price": price}) for wrong in skus if wrong != sku]
    call = ("set_price", {"sku": sku, "price": price})
    return field_job(f"Set the price of {sku} to {price}.", 2, call, "price", "stock", slips)


def movement(sku: str, count: int, kind: tuple[str, int, str], skus: Sequence[str]) -> DeskJob:
    task, sign, reason = kind
    arguments = {"sku": sku, "change": sign * count, "reason": reason}
    slips: list[Call] = [
        ("change_stock", arguments | {"change": -sign * count}),
        ("get_product", {"sku": sku}),
        *(("change_stock", arguments | {"sku": wrong}) for wrong in skus if wrong != sku),
    ]
    return field_job(task.format(count, sku), 3, ("change_stock", arguments), "stock", "reorder_at", slips)


def draw_shop(rng: random.Random) -> Shop:
    """Draw eight products of three categories."""
    skus = [f"P-{number}" for number in sorted(rng.sample(range(100, 1000), 8))]
    names = [(name, kind) for kind in rng.sample(sorted(_CATALOGUE), 3) for name in _CATALOGUE[kind]]
    prices = [number / 2 for number in rng.sample(range(6, 200), 8)]
    rows = (
        (sku, *named, price, rng.randrange(0, 60), rng.randrange(3, 30))
        for sku, named, price in zip(skus, rng.sample(names, 8), prices, strict=True)
    )
    return [dict(zip(_FIELDS, row, strict=True)) for row in rows]


def _lookup_case(rng: random.Random, shop: Shop) -> Case:
    product, question = rng.choice(shop), rng.choice(LOOKUPS)
    return _case(shop, lookup(product["sku"], question, _skus(shop)), {}, product[question[1]])


def _price_case(rng: random.Random, shop: Shop) -> Case:
    sku, price = rng.choice(shop)["sku"], rng.randrange(11, 100)
    return _case(shop, new_price(sku, price, _skus(shop)), {sku: {"price": float(price)}}, float(price))


def _movement_case(rng: random.Random, shop: Shop) -> Case:
    kind = rng.choice(MOVEMENTS)
    count = rng.randrange(2, 30)
    # Not every product can be sold that often; deliveries fit all.
    product = rng.choice(
        [p for p in shop if kind[1] > 0 or p["stock"] >= count] or [max(shop, key=lambda p: p["stock"])]
    )
    count = count if kind[1] > 0 else min(count, product["stock"])
    stock = product["stock"] + kind[1] * count
    return _case(shop, movement(product["sku"], count, kind, _skus(shop)), {product["sku"]: {"stock": stock}}, stock)


def _by_name_case(rng: random.Random, shop: Shop) -> Case:
    product, price = rng.choice(shop), rng.randrange(11, 100)
    find: Call = ("search_products", {"text": product["name"]})
    job = field_job(
        f"Set the price of the {product['name']} to {price}.", 4,
        ("set_price", {"sku": product["sku"], "price": price}), "price", "stock", (), before=(find,),
    )  # fmt: skip
    return _case(shop, job, {product["sku"]: {"price": float(price)}}, float(price))


def _cheapest_case(rng: random.Random, shop: Shop) -> Case:
    category = rng.choice(shop)["category"]
    cheapest = min((p for p in shop if p["category"] == category), key=lambda p: (p["price"], p["sku"]))
    job = planned_job(
        f"Which product in {category} is the cheapest? Say its SKU.", 4,
        [("list_products", {"category": category})], cheapest["sku"],
    )  # fmt: skip
    return _case(shop, job, {}, cheapest["sku"])


def _order_case(rng: random.Random, shop: Shop) -> Case:
    """Ask to book a customer's order, which may be larger than the stock."""
    product, count = rng.choice(shop), rng.randrange(5, 60)
    sku, enough = product["sku"], product["stock"] >= count
    sold: list[Call] = [("change_stock", {"sku": sku, "change": -count, "reason": "sold"})]
    left = product["stock"] - count * enough
    job = planned_job(
        f"A customer wants {count} of {sku}. Book them as sold if there are enough, else change nothing. How many are "
        "in stock then?", 4, [("get_product", {"sku": sku}), *(sold if enough else [])], str(left),
    )  # fmt: skip
    return _case(shop, job, {sku: {"stock": left}} if enough else {}, left)


def _restock_case(rng: random.Random, shop: Shop) -> Case:
    """Ask for orders of all products that are low: one to three of them."""
    for product in shop:
        product["stock"] = product["reorder_at"] + rng.randrange(1, 40)
    low = rng.sample(shop, rng.randrange(1, 4))
    for product in low:
        product["stock"] = rng.randrange(0, product["reorder_at"] + 1)
    changes = {p["sku"]: {"stock": 2 * p["reorder_at"]} for p in low}
    orders: list[Call] = [
        ("change_stock", {"sku": p["sku"], "change": 2 * p["reorder_at"] - p["stock"], "reason": "ordered"})
        for p in sorted(low, key=lambda p: p["sku"])
    ]
    job = planned_job(
        "Bring the stock of every product that is low to twice the level at which to order more. How many products "
        "were low?", 5, [("list_low_stock", {}), *orders], str(len(low)),
    )  # fmt: skip
    return _case(shop, job, changes, len(low))


def _skus(shop: Shop) -> list[str]:
    return [product["sku"] for product in shop]


def _case(shop: Shop, job: DeskJob, changes: dict[str, dict[str, Any]], answer: object) -> Case:
    end = [product | changes.get(product["sku"], {}) for product in shop]
    return Case(job=job, start=shop, end=end, answer=str(answer), changes=bool(changes))


_KINDS: tuple[tuple[int, Callable[[random.Random, Shop], Case]], ...] = (
    (1, _lookup_case), (2, _price_case), (3, _movement_case), (4, _by_name_case), (4, _cheapest_case),
    (4, _order_case), (5, _restock_case),
)  # fmt: skip


class Inventory(ServerTask):
    """A task: answer questions about a shop's stock, and change it, with the seven tools of an MCP server.

    A tiny model does jobs of one call; plans of several calls are beyond it.
    """

    name: ClassVar[str] = "inventory"
    description: ClassVar[str] = "answer questions about a shop's stock, and change it, with the tools of an MCP server"
    rubric: ClassVar[str | None] = RUBRIC.format(
        subject="the shop's stock", right="with the right product and number", result="the price or the stock"
    )
    server: ClassVar[LocalServer] = LocalServer("inventory_server")

    def draw_case(self, rng: random.Random, max_difficulty: int) -> Case:
        shop = draw_shop(rng)
        return rng.choice([kind for level, kind in _KINDS if level <= max_difficulty])(rng, shop)

    def open_state(self, rows: list[dict[str, Any]]) -> sqlite3.Connection:
        shop: sqlite3.Connection = self.server.module.open_shop([tuple(row.values()) for row in rows])
        return shop

    def rows_of(self, state: sqlite3.Connection) -> list[dict[str, Any]]:
        return [dict(row) for row in state.execute("SELECT * FROM products ORDER BY sku")]
