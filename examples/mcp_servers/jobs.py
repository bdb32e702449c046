"""The jobs of this example: kinds of the tasks `inventory` and `calendar`, about what the servers begin with."""

from __future__ import annotations

import random
from dataclasses import replace

from art_tasks.desks import calendar_jobs as week
from art_tasks.desks import inventory_jobs as shop
from art_tasks.desks.server_task import DeskJob

SKUS = ["P-100", "P-101", "P-102", "P-200", "P-201", "P-300", "P-301", "P-302"]
TITLES = ["planning", "interview", "design review", "dentist", "customer call", "retrospective"]
PER_KIND = 12
"""Largest number of jobs of each kind."""


def inventory_jobs() -> list[DeskJob]:
    """Jobs about prices, stocks and categories, new prices, deliveries and sales."""
    arrived, sold = shop.MOVEMENTS
    kinds = [
        *([shop.lookup(sku, question, [*SKUS, "P-400"]) for sku in SKUS] for question in shop.LOOKUPS),
        [shop.new_price(sku, price, SKUS) for sku in SKUS for price in range(21, 99, 7)],
        [shop.movement(sku, count, arrived, SKUS) for sku in SKUS for count in range(2, 10)],
        [
            shop.movement(sku, count, sold, SKUS)
            for sku in ["P-101", "P-200", "P-300", "P-301", "P-302"]
            for count in range(2, 10)
        ],
    ]
    return _some_of_each(kinds)


def calendar_jobs() -> list[DeskJob]:
    """Jobs about the time and length of events, about the events of a day, and about cancelling and moving events."""
    events = range(1, len(TITLES) + 1)
    kinds = [
        *([week.question_job(title, question, [*TITLES, "lunch"]) for title in TITLES] for question in week.QUESTIONS),
        [replace(week.first_event_job(person, day), difficulty=4) for person in week.PEOPLE for day in week.DAYS],
        [week.cancel_job(event, [*events, 7]) for event in events],
        [
            replace(week.move_job(event, f"{day} {hour}:00", events), difficulty=5)
            for event in events
            for day, hour in ((week.DAYS[3], 10), (week.DAYS[4], 13))  # nobody is busy then
        ],
    ]
    return _some_of_each(kinds)


def _some_of_each(kinds: list[list[DeskJob]]) -> list[DeskJob]:
    rng = random.Random(0)
    return [job for kind in kinds for job in (rng.sample(kind, PER_KIND) if len(kind) > PER_KIND else kind)]
