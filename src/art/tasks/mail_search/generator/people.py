"""People of a generated mailbox: colleagues with roles, and contacts at other companies."""

from __future__ import annotations

import random
from dataclasses import dataclass

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
MAX_PEOPLE = len(FIRST_NAMES) * len(LAST_NAMES) // 4
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


def draw_people(rng: random.Random, count: int) -> list[Person]:
    """Draw people with different names. The first is the owner of the mailbox, a colleague of the next ones."""
    names = rng.sample([(first, last) for first in FIRST_NAMES for last in LAST_NAMES], count)
    num_outside = round(count * OUTSIDE_SHARE)
    people = []
    for i, (first, last) in enumerate(names):
        if i >= count - num_outside:
            company = rng.choice(COMPANIES)
            people.append(
                Person(first, last, "Account Manager", company, company.replace(" ", "").lower() + ".example")
            )
        else:
            department = rng.choice(sorted(_DEPARTMENTS))
            people.append(Person(first, last, rng.choice(_DEPARTMENTS[department]), COMPANY, DOMAIN))
    return people
