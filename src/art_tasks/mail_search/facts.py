"""What a generated mailbox is made of: people, subjects with attributes, and the sentences about them.

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

COMPANY, DOMAIN = "Larkfield", "larkfield.example"
FIRST_NAMES = (
    "Ada", "Amir", "Anna", "Bela", "Bruno", "Carla", "Chen", "Dario", "Deniz", "Edda", "Emeka", "Farah", "Felix",
    "Gita", "Goran", "Hana", "Henrik", "Ida", "Ivo", "Jana", "Jonas", "Kaya", "Kofi", "Lena", "Luis", "Mara",
    "Milan", "Nadia", "Nils", "Olga", "Omar", "Paula", "Pavel", "Rania", "Remy", "Saskia", "Silvio", "Tara",
    "Tomas", "Uma", "Vera", "Viktor", "Wanda", "Yusuf", "Zoe",
)  # fmt: skip
LAST_NAMES = (
    "Abara", "Ansel", "Barros", "Bergman", "Brandt", "Castell", "Dorn", "Eklund", "Farkas", "Fontana", "Gruber",
    "Haddad", "Halloran", "Hirsch", "Iversen", "Jansky", "Kessler", "Kovac", "Lindqvist", "Lombard", "Marchetti",
    "Mensah", "Moreau", "Nakata", "Novak", "Okafor", "Ostrow", "Petrov", "Quintana", "Rask", "Reyes", "Sandoval",
    "Sorensen", "Takala", "Thorne", "Ulrich", "Varga", "Wallin", "Yilmaz", "Zeman",
)  # fmt: skip
_DEPARTMENTS = {
    "Finance": ("Controller", "Head of Finance", "Accountant"),
    "Sales": ("Account Manager", "Sales Lead", "Key Account Manager"),
    "Operations": ("Office Manager", "Buyer", "Facility Manager"),
    "Engineering": ("Engineer", "Team Lead", "Architect"),
    "People": ("Recruiter", "HR Partner"),
    "Marketing": ("Event Manager", "Editor"),
}
_COMPANY_FIRST = (
    "Alder", "Amber", "Birch", "Brook", "Cedar", "Clear", "Copper", "Dover", "Elm", "Falcon", "Glen", "Halden",
    "Harbor", "Iron", "Juniper", "Keystone", "Linden", "Maple", "North", "Oak", "Pine", "Quarry", "River", "Silver",
    "Stone", "Tidal", "Union", "Vale", "West", "Willow",
)  # fmt: skip
_COMPANY_LAST = (
    "Foods", "Freight", "Furniture", "Glass", "Health", "Hotels", "Labs", "Logistics", "Media", "Metals", "Motors",
    "Optics", "Paper", "Power", "Print", "Robotics", "Software", "Steel", "Supplies", "Textiles",
)  # fmt: skip
COMPANIES = tuple(f"{first} {last}" for first in _COMPANY_FIRST for last in _COMPANY_LAST)
NUM_PEOPLE = 40
"""Number of people of a mailbox."""
OUTSIDE_SHARE = 0.3
"""Share of the people who work elsewhere."""


@dataclass(frozen=True, slots=True)
class Person:
    """A person who sends and receives emails."""

    first: str
    last: str
    role: str
    company: str
    domain: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"

    @property
    def address(self) -> str:
        return f"{self.first}.{self.last}@{self.domain}".lower()

    @property
    def is_colleague(self) -> bool:
        return self.domain == DOMAIN


def draw_people(rng: random.Random) -> list[Person]:
    """Draw people with different names. The first is the owner of the mailbox, a colleague of the next ones."""
    names = rng.sample([(first, last) for first in FIRST_NAMES for last in LAST_NAMES], NUM_PEOPLE)
    num_outside = round(NUM_PEOPLE * OUTSIDE_SHARE)
    people = []
    for i, (first, last) in enumerate(names):
        if i >= NUM_PEOPLE - num_outside:
            company = rng.choice(COMPANIES)
            people.append(
                Person(first, last, "Account Manager", company, company.replace(" ", "").lower() + ".example")
            )
        else:
            department = rng.choice(sorted(_DEPARTMENTS))
            people.append(Person(first, last, rng.choice(_DEPARTMENTS[department]), COMPANY, DOMAIN))
    return people


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
    questions: tuple[str, str]

    def draw(self, rng: random.Random, subject: str) -> str:
        """Draw a value for a subject."""
        return _DRAWS[self.name](rng, subject)


def write_day(day: datetime.date) -> str:
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def _amount(rng: random.Random, subject: str) -> str:
    return f"{rng.randrange(20, 990) * 50:,} EUR"


def _day(rng: random.Random, subject: str) -> str:
    return write_day(datetime.date(2026, 3, 20) + datetime.timedelta(days=rng.randrange(250)))


def _house(rng: random.Random, subject: str) -> str:
    return f"{rng.choice(_COLOURS)} {rng.choice(_ANIMALS)} {rng.choice(_HOUSES)}"


def _departure(rng: random.Random, subject: str) -> str:
    """Draw a day in the month that a trip is named after, at the earliest in April."""
    month = next(i for i, name in enumerate(MONTHS, 1) if name in subject)
    return write_day(datetime.date(2026 if month > 3 else 2027, month, rng.randrange(1, 29)))


_DRAWS: dict[str, Callable[[random.Random, str], str]] = {
    "budget": _amount, "entry fee": _amount, "rent": _amount, "deadline": _day, "signing date": _day, "hotel": _house,
    "venue": _house, "departure": _departure,
    "supplier": lambda rng, _: rng.choice(COMPANIES),
    "discount": lambda rng, _: f"{rng.randrange(3, 40)} percent",
    "flight": lambda rng, _: f"{rng.choice(('AX', 'KQ', 'LZ', 'NB', 'TR'))} {rng.randrange(200, 9900)}",
    "door code": lambda rng, _: f"{rng.choice('ABCDEF')}{rng.randrange(1000, 9999)}",
}  # fmt: skip
"""Draws a value of an attribute for a subject, by the attribute's name."""


_SUBJECTS: dict[str, tuple[Callable[[random.Random], str], tuple[Attribute, ...]]] = {
    "project": (
        lambda rng: f"Project {rng.choice(_COLOURS)} {rng.choice(_ANIMALS)}",
        (
            Attribute("budget", "number", ("What is the budget for {}?", "How much may we spend on {}?")),
            Attribute("deadline", "date", ("What is the deadline for {}?", "By when must {} be finished?")),
            Attribute("supplier", "name", ("Who is the supplier for {}?", "Which company delivers to {}?")),
        ),
    ),
    "trip": (
        lambda rng: f"the {rng.choice(MONTHS)} trip to {rng.choice(CITIES)}",
        (
            Attribute("hotel", "name", ("What is the hotel for {}?", "Where do we stay on {}?")),
            Attribute("departure", "date", ("When is the departure for {}?", "When do we leave for {}?")),
            Attribute("flight", "code", ("What is the flight for {}?", "Which plane do we take on {}?")),
        ),
    ),
    "workshop": (
        lambda rng: f"the {rng.choice(_TOPICS)} workshop in {rng.choice(CITIES)} in {rng.choice(MONTHS)}",
        (
            Attribute("venue", "name", ("What is the venue for {}?", "Where does {} take place?")),
            Attribute("entry fee", "number", ("What is the entry fee for {}?", "What does {} cost?")),
        ),
    ),
    "contract": (
        lambda rng: f"the contract with {rng.choice(COMPANIES)}",
        (
            Attribute("discount", "number", ("What is the discount for {}?", "What do we save under {}?")),
            Attribute("signing date", "date", ("What is the signing date for {}?", "When will {} be signed?")),
        ),
    ),
    "office": (
        lambda rng: f"the {rng.choice(CITIES)} office near {rng.choice(_COLOURS)} {rng.choice(_ANIMALS)} Square",
        (
            Attribute("door code", "code", ("What is the door code for {}?", "How do I get into {}?")),
            Attribute("rent", "number", ("What is the rent for {}?", "What do we pay a month for {}?")),
        ),
    ),
}  # fmt: skip


def draw_subject(rng: random.Random) -> tuple[str, tuple[Attribute, ...]]:
    draw, attributes = _SUBJECTS[rng.choice(sorted(_SUBJECTS))]
    return draw(rng), attributes


def draw_day(rng: random.Random) -> str:
    return _day(rng, "")


def draw_order(rng: random.Random) -> str:
    place = f"{rng.choice(CITIES)} {rng.choice(('office', 'warehouse', 'shop'))}"
    return f"the {rng.randrange(4, 60)} {rng.choice(ITEMS)} for the {place}"


FILLERS = (
    "I hope you had a good weekend.", "Sorry for the late answer.", "I am in meetings for the rest of the day.",
    "Tell me if anything is unclear.", "We can go through the details on Thursday.", "The team did good work here.",
    "I have put everything else on the shared drive.", "Please do not pass this on outside the company.",
    "I will be back at my desk tomorrow morning.", "Some points are still open, but they can wait.",
)  # fmt: skip
REPLIES = (
    "Thank you, that helps.", "Noted.", "Thanks, I will pass it on.", "All right.", "Good to know.",
    "Thank you. I will come back to you if I have questions.", "Fine with me.", "Got it, thanks for the quick answer.",
    "Let us talk about it over lunch.", "I have added it to my notes.",
)  # fmt: skip
TALK = (
    ("Lunch on Friday", "Shall we try the new place at the corner on Friday?"),
    ("Parking", "The lower deck of the garage is closed this week."),
    ("Network maintenance", "The network will be slow on Saturday between two and four."),
    ("Parcel at the reception", "There is a parcel at the reception with no name on it."),
    ("Weekly meeting", "I have moved our weekly meeting to the small room."),
    ("Minutes of the meeting", "Here is what we talked about. Nothing was decided."),
    ("Draft of the report", "I have read the draft and left some remarks at the margin."),
    ("Holiday plans", "Please enter your holidays in the calendar by the end of the month."),
    ("Coffee machine", "The coffee machine on our floor works again."),
    ("Budget round", "The budget round starts soon. Please collect what you need."),
    ("Travel rules", "Please book a hotel early and keep the receipts of each trip."),
    ("Invoices", "Two invoices have no order number. Please look for yours."),
    ("Welcome", "A new colleague starts on Monday. Please say hello."),
    ("Keys", "I have found some keys in the meeting room."),
    ("Presentation", "Could you look at my slides before the customer comes?"),
    ("Deadline of the survey", "The survey about the canteen closes soon, please take part."),
)  # fmt: skip
