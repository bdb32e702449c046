"""The jobs that can be done with the two servers, each with the call that does it and with beginners' wrong calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

Call = tuple[str, dict[str, Any]]
"""A tool and its arguments."""

SKUS = ["P-100", "P-101", "P-102", "P-200", "P-201", "P-300", "P-301", "P-302"]
PEOPLE = ["ann", "bob", "cleo", "dan"]
TITLES = ["planning", "interview", "design review", "dentist", "customer call", "retrospective"]
DAYS = [str(date(2030, 1, 7) + timedelta(days=i)) for i in range(5)]
PER_KIND = 12
"""Largest number of jobs of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    task: str
    difficulty: int
    """Equal for jobs of a kind, so that both training and held-out jobs have some of each kind."""
    call: Call
    """The call that does the job."""
    answer: Callable[[str], str]
    """Returns the right answer from the tool's result."""
    mistaken: Callable[[str], str]
    """Returns the answer of a player who reads the wrong line of the result."""
    slips: tuple[Call, ...]
    """Wrong calls."""


def inventory_jobs() -> list[Job]:
    """Jobs about prices, stocks and categories, new prices, deliveries and sales."""
    kinds: list[list[Job]] = []
    for task, field, other in (
        ("What is the price of {}?", "price", "stock"),
        ("How many of {} are in stock?", "stock", "reorder_at"),
        ("Which category is {} in?", "category", "name"),
    ):
        kinds.append(
            [
                _job(task.format(sku), 1, ("get_product", {"sku": sku}), field, other,
                     [("get_product", {"sku": wrong}) for wrong in (*SKUS, "P-400") if wrong != sku])
                for sku in SKUS
            ]
        )  # fmt: skip
    kinds.append(
        [
            _job(f"Set the price of {sku} to {price}.", 2, ("set_price", {"sku": sku, "price": price}), "price",
                 "stock", [("set_price", {"sku": sku, "price": price + 10}), ("get_product", {"sku": sku}),
                           *(("set_price", {"sku": wrong, "price": price}) for wrong in SKUS if wrong != sku)])
            for sku in SKUS
            for price in range(21, 99, 7)
        ]
    )  # fmt: skip
    for task, sign, reason in (("{} of {} have arrived.", 1, "arrived"), ("We sold {} of {}.", -1, "sold")):
        kinds.append(
            [
                _job(task.format(count, sku), 3,
                     ("change_stock", {"sku": sku, "change": sign * count, "reason": reason}), "stock", "reorder_at",
                     [("change_stock", {"sku": sku, "change": -sign * count, "reason": reason}),
                      ("get_product", {"sku": sku}),
                      *(("change_stock", {"sku": wrong, "change": sign * count, "reason": reason})
                        for wrong in SKUS if wrong != sku)])
                for sku in (SKUS if sign > 0 else ["P-101", "P-200", "P-300", "P-301", "P-302"])
                for count in range(2, 10)
            ]
        )  # fmt: skip
    return _some_of_each(kinds)


def calendar_jobs() -> list[Job]:
    """Jobs about the time and length of events, about the events of a day, and about cancelling and moving events."""
    kinds = [
        [
            _job(task.format(title), difficulty, ("search_events", {"text": title}), field, other,
                 [("search_events", {"text": wrong}) for wrong in (*TITLES, "lunch") if wrong != title])
            for title in TITLES
        ]
        for difficulty, task, field, other in (
            (3, "When is the {}?", "start", "title"),
            (2, "How many minutes is the {}?", "minutes", "id"),
        )
    ]  # fmt: skip
    kinds.append(
        [
            _job(f"First event of {person} on {day}?", 4, ("list_events", {"day": day, "person": person}),
                 "title", "start",
                 [("list_events", {"day": day, "person": wrong}) for wrong in PEOPLE if wrong != person]
                 + [("list_events", {"day": wrong, "person": person}) for wrong in DAYS if wrong != day])
            for person in PEOPLE
            for day in DAYS
        ]
    )  # fmt: skip
    events = range(1, len(TITLES) + 1)
    kinds.append(
        [
            Job(task=f"Cancel event {event}.", difficulty=1, call=("cancel_event", {"id": event}),
                answer=lambda result: result.removeprefix("cancelled: "), mistaken=lambda result: "cancelled",
                slips=tuple(("cancel_event", {"id": wrong}) for wrong in (*events, 7) if wrong != event))
            for event in events
        ]
    )  # fmt: skip
    kinds.append(
        [
            _job(f"Move event {event} to {day} {hour}:00.", 5,
                 ("move_event", {"id": event, "start": f"{day} {hour}:00"}), "start", "title",
                 [("move_event", {"id": wrong, "start": f"{day} {hour}:00"}) for wrong in events if wrong != event]
                 + [("move_event", {"id": event, "start": f"{wrong} {hour}:00"}) for wrong in DAYS if wrong != day])
            for event in events
            for day, hour in ((DAYS[3], 10), (DAYS[4], 13))  # nobody is busy then
        ]
    )  # fmt: skip
    return _some_of_each(kinds)


def _job(task: str, difficulty: int, call: Call, field: str, other: str, slips: list[Call]) -> Job:
    """Make a job whose answer is `field` of the first object that the tool returns. Beginners read `other` instead."""
    return Job(
        task=task, difficulty=difficulty, call=call, slips=tuple(slips),
        answer=lambda result: _field(result, field), mistaken=lambda result: _field(result, other),
    )  # fmt: skip


def _field(result: str, name: str) -> str:
    """A field of the first object in a tool's result, as text.

    Example: _field('{"price": 35.5}', "price") is "35.5", and _field('{"result": []}', "price") is "nothing".
    """
    try:
        first, _ = json.JSONDecoder().raw_decode(result)
    except ValueError:
        return "failed"
    if first == {"result": []}:
        return "nothing"
    return str(first.get(name, "failed")) if isinstance(first, dict) else "failed"


def _some_of_each(kinds: list[list[Job]]) -> list[Job]:
    rng = random.Random(0)
    return [job for kind in kinds for job in (rng.sample(kind, PER_KIND) if len(kind) > PER_KIND else kind)]
