"""What emails of a generated mailbox are about: subjects, their attributes, and sentences that state or mention them.

a subject      "the May trip to Porto"          an attribute    hotel
stated         "The hotel for the May trip to Porto is Red Heron Inn."
changed        "Correction: the hotel for the May trip to Porto is now the Harbor Inn, not the Red Heron Inn."
mentioned      "Do we know the hotel for the May trip to Porto yet?"                         no value
dropped        "My first idea for the hotel for the May trip to Porto was Wild Hare Park, but that was dropped."
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from art.tasks.mail_search.generator.people import COMPANIES

Kind = Literal["number", "date", "name", "code"]
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
CITIES = (
    "Aarhus", "Antwerp", "Basel", "Bergen", "Bilbao", "Bologna", "Bremen", "Brno", "Cork", "Dresden", "Gdansk",
    "Genoa", "Ghent", "Graz", "Leeds", "Leipzig", "Linz", "Lyon", "Malmo", "Nantes", "Odense", "Ostrava", "Porto",
    "Riga", "Seville", "Split", "Tartu", "Trieste", "Turku", "Utrecht", "Valencia", "Vilnius", "Zadar", "Zurich",
)  # fmt: skip
_COLOURS = (
    "Amber", "Blue", "Bright", "Brisk", "Calm", "Copper", "Crimson", "Early", "Gentle", "Golden", "Green", "Hidden",
    "Ivory", "Late", "Little", "Lucky", "Northern", "Quiet", "Rapid", "Red", "Silver", "Silent", "Southern",
    "Steady", "Sunny", "Tall", "Violet", "Western", "White", "Wild",
)  # fmt: skip
_ANIMALS = (
    "Badger", "Beetle", "Bison", "Crane", "Cricket", "Dolphin", "Egret", "Ferret", "Finch", "Gecko", "Gull", "Hare",
    "Heron", "Ibex", "Jackdaw", "Kestrel", "Lynx", "Magpie", "Marten", "Newt", "Otter", "Owl", "Pelican", "Plover",
    "Raven", "Salmon", "Seal", "Swift", "Thrush", "Weasel",
)  # fmt: skip
_TOPICS = (
    "accounting", "branding", "budgeting", "coaching", "design", "export", "hiring", "leadership", "logistics",
    "packaging", "pricing", "privacy", "product", "purchasing", "quality", "recycling", "safety", "sales",
    "security", "strategy", "testing", "training", "writing", "warehouse",
)  # fmt: skip
ITEMS = (
    "desk lamps", "standing desks", "office chairs", "monitors", "headsets", "whiteboards", "bookshelves",
    "coffee machines", "lockers", "projectors", "keyboards", "docking stations", "plants", "filing cabinets",
)  # fmt: skip
_HOUSES = ("Inn", "House", "Lodge", "Rooms", "Hall", "Park", "Court", "Terrace")

STATED = (
    "The {attribute} for {subject} is {value}.",
    "Just so that everybody has it: the {attribute} for {subject} is {value}.",
    "I have checked it again, and the {attribute} for {subject} is {value}.",
    "For your planning, the {attribute} for {subject} is {value}.",
)
CHANGED = (
    "Correction: the {attribute} for {subject} is now {value}, not {old}.",
    "There is a change. The {attribute} for {subject} is now {value} instead of {old}.",
    "Please forget what was said before, the {attribute} for {subject} is now {value}.",
)
MENTIONED = (
    "Do we know the {attribute} for {subject} yet?",
    "I still have to find out about the {attribute} for {subject}.",
    "Somebody asked me about the {attribute} for {subject} again.",
    "Let us talk about the {attribute} for {subject} next week.",
)
DROPPED = (
    "My first idea of the {attribute} for {subject} was {value}, but that was dropped.",
    "Somebody suggested {value} as the {attribute} for {subject}, which nobody wanted.",
)


@dataclass(frozen=True, slots=True)
class Attribute:
    """What a subject may have, with questions about it. The second question uses other words than the emails do."""

    name: str
    kind: Kind
    draw: Callable[[random.Random, str], str]
    """Draws a value for a subject."""
    questions: tuple[str, str]


def write_day(day: datetime.date) -> str:
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def _amount(rng: random.Random, subject: str) -> str:
    return f"{rng.randrange(20, 990) * 50:,} EUR"


def _percent(rng: random.Random, subject: str) -> str:
    return f"{rng.randrange(3, 40)} percent"


def _day(rng: random.Random, subject: str) -> str:
    return write_day(datetime.date(2026, 3, 20) + datetime.timedelta(days=rng.randrange(250)))


def _house(rng: random.Random, subject: str) -> str:
    return f"{rng.choice(_COLOURS)} {rng.choice(_ANIMALS)} {rng.choice(_HOUSES)}"


def _company(rng: random.Random, subject: str) -> str:
    return rng.choice(COMPANIES)


def _departure(rng: random.Random, subject: str) -> str:
    """Draw a day in the month that a trip is named after, at the earliest in April."""
    month = next(i for i, name in enumerate(MONTHS, 1) if name in subject)
    return write_day(datetime.date(2026 if month > 3 else 2027, month, rng.randrange(1, 29)))


def _flight(rng: random.Random, subject: str) -> str:
    return f"{rng.choice(('AX', 'KQ', 'LZ', 'NB', 'TR'))} {rng.randrange(200, 9900)}"


def _door_code(rng: random.Random, subject: str) -> str:
    return f"{rng.choice('ABCDEF')}{rng.randrange(1000, 9999)}"


_SUBJECTS: dict[str, tuple[Callable[[random.Random], str], tuple[Attribute, ...]]] = {
    "project": (
        lambda rng: f"Project {rng.choice(_COLOURS)} {rng.choice(_ANIMALS)}",
        (
            Attribute("budget", "number", _amount, ("What is the budget for {}?", "How much may we spend on {}?")),
            Attribute("deadline", "date", _day, ("What is the deadline for {}?", "By when must {} be finished?")),
            Attribute("supplier", "name", _company, ("Who is the supplier for {}?", "Which company delivers to {}?")),
        ),
    ),
    "trip": (
        lambda rng: f"the {rng.choice(MONTHS)} trip to {rng.choice(CITIES)}",
        (
            Attribute("hotel", "name", _house, ("What is the hotel for {}?", "Where do we stay on {}?")),
            Attribute("departure", "date", _departure, ("When is the departure for {}?", "When do we leave for {}?")),
            Attribute("flight", "code", _flight, ("What is the flight for {}?", "Which plane do we take on {}?")),
        ),
    ),
    "workshop": (
        lambda rng: f"the {rng.choice(_TOPICS)} workshop in {rng.choice(CITIES)} in {rng.choice(MONTHS)}",
        (
            Attribute("venue", "name", _house, ("What is the venue for {}?", "Where does {} take place?")),
            Attribute("entry fee", "number", _amount, ("What is the entry fee for {}?", "What does {} cost?")),
        ),
    ),
    "contract": (
        lambda rng: f"the contract with {rng.choice(COMPANIES)}",
        (
            Attribute("discount", "number", _percent, ("What is the discount for {}?", "What do we save under {}?")),
            Attribute("signing date", "date", _day, ("What is the signing date for {}?", "When will {} be signed?")),
        ),
    ),
    "office": (
        lambda rng: f"the {rng.choice(CITIES)} office near {rng.choice(_COLOURS)} {rng.choice(_ANIMALS)} Square",
        (
            Attribute("door code", "code", _door_code, ("What is the door code for {}?", "How do I get into {}?")),
            Attribute("rent", "number", _amount, ("What is the rent for {}?", "What do we pay a month for {}?")),
        ),
    ),
}  # fmt: skip


def draw_subject(rng: random.Random) -> tuple[str, tuple[Attribute, ...]]:
    draw, attributes = _SUBJECTS[rng.choice(sorted(_SUBJECTS))]
    return draw(rng), attributes


def draw_day(rng: random.Random) -> str:
    return _day(rng, "")


def draw_workshop(rng: random.Random) -> str:
    return _SUBJECTS["workshop"][0](rng)


def draw_order(rng: random.Random) -> str:
    place = f"{rng.choice(CITIES)} {rng.choice(('office', 'warehouse', 'shop'))}"
    return f"the {rng.randrange(4, 60)} {rng.choice(ITEMS)} for the {place}"
