"""The people, rooms, hours, weapons and motives of a puzzle: a `Cast`, and the lists of words for it."""

from __future__ import annotations

from dataclasses import dataclass

VICTIM = "Marlow"
SUSPECTS = (
    "Ada", "Basil", "Cora", "Dorian", "Edith", "Felix", "Greta", "Hugo", "Iris", "Jasper", "Leonie", "Norbert",
)  # fmt: skip
ROOMS = (
    "study", "attic", "cellar", "kitchen", "library", "terrace", "chapel", "gallery", "pantry", "nursery", "stable",
    "tower",
)  # fmt: skip
WEAPONS = (
    "hatpin", "shovel", "scissors", "corkscrew", "bottle", "hammer", "scarf", "lamp", "chisel", "sickle", "trophy",
    "anvil",
)  # fmt: skip
MOTIVES = (
    "envy", "greed", "fear", "revenge", "pride", "debt", "shame", "rivalry", "boredom", "ambition", "spite", "grief",
)  # fmt: skip
HOURS = ("five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MAX_SIZE = 8
"""Largest number of suspects, rooms, hours, weapons or motives of a puzzle."""


@dataclass(frozen=True, slots=True)
class Cast:
    """What a puzzle is about. Everything else refers to these words by their indices.

    Example: `Cast(suspects=("Ada", "Hugo"), rooms=("attic", "study"), hours=("five",), weapons=(), motives=())`. A
    puzzle may have no weapons, or no motives. Otherwise there is at least one for each suspect.
    """

    suspects: tuple[str, ...]
    rooms: tuple[str, ...]
    """Rooms in the order of a walk around the house: each has a door to the next, and the last has one to the first."""
    hours: tuple[str, ...]
    weapons: tuple[str, ...]
    motives: tuple[str, ...]

    @property
    def people(self) -> tuple[str, ...]:
        """The suspects, and the victim last."""
        return (*self.suspects, VICTIM)

    def next_to(self, room: int) -> set[int]:
        """The rooms in which a person may be an hour later: the same one and those next to it."""
        return {(room + change) % len(self.rooms) for change in (-1, 0, 1)}
