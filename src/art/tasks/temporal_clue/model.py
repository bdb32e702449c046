"""The variables of a puzzle and the rules that hold in every puzzle.

A world is a value for each variable of a `Model`: who is where at each hour, who carries what and why, and the five
facts of the murder. The possible values of a variable are the bits of an integer. Every rule and every clue is a limit
on one variable or on a pair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

Table = list[int]
"""`table[values of x]` is the set of values of y that at least one of these values of x allows."""
World = tuple[int, ...]
"""A value for each variable of a model."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on one variable: its value is one of `values`, a set of bits."""

    variable: int
    values: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A limit on two variables, given by tables for both directions."""

    x: int
    y: int
    tables: tuple[Table, Table]


Limits = Iterable[Limit | Pair]


class Model:
    """The variables of a puzzle with this cast, and the limits that hold in every puzzle.

    With S suspects, R rooms and H hours, person p (the victim is number S) is in room `room(p, h)` at hour h. Suspect s
    carries weapon `weapon_of(s)`, and weapon w is in the hands of suspect `holder(w)`, or of nobody (value S). Motives
    are the same with `motive_of` and `feeler`. The facts of the murder are `who`, `where`, `when`, `what` and `why`.
    """

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.num_suspects, self.num_hours = len(cast.suspects), len(cast.hours)
        self.sizes = [len(cast.rooms)] * (self.num_hours * len(cast.people))
        self._first_weapon = self._add_match(len(cast.weapons))
        self._first_motive = self._add_match(len(cast.motives))
        self.who = len(self.sizes)
        self.where, self.when, self.what, self.why = range(self.who + 1, self.who + 5)
        # Without weapons or motives, the fact has one value and no meaning.
        facts = (cast.suspects, cast.rooms, cast.hours, cast.weapons, cast.motives)
        self.sizes += [max(1, len(words)) for words in facts]

    def _add_match(self, num: int) -> int:
        first = len(self.sizes)
        owners = self.num_suspects + (num > self.num_suspects)  # with more than there are suspects, nobody has some
        self.sizes += [num] * self.num_suspects + [owners] * num if num else []
        return first

    def room(self, person: int, hour: int) -> int:
        return person * self.num_hours + hour

    def weapon_of(self, suspect: int) -> int:
        return self._first_weapon + suspect

    def holder(self, weapon: int) -> int:
        return self._first_weapon + self.num_suspects + weapon

    def motive_of(self, suspect: int) -> int:
        return self._first_motive + suspect

    def feeler(self, motive: int) -> int:
        return self._first_motive + self.num_suspects + motive

    def has_owner(self, owner: int) -> Limit:
        """The limit that a suspect has this weapon or motive. `owner` is a holder or feeler."""
        return Limit(owner, (1 << self.num_suspects) - 1)

    @cached_property
    def rules(self) -> list[Limit | Pair]:
        """The limits of every puzzle: people walk through doors, and each suspect has a weapon and a motive alone."""
        rules: list[Limit | Pair] = []
        neighbours = frozenset((a, b) for a in range(len(self.cast.rooms)) for b in self.cast.next_to(a))
        for person in range(len(self.cast.people)):
            for hour in range(self.num_hours - 1):
                rules.append(self.pair(self.room(person, hour), self.room(person, hour + 1), neighbours))
        for owned, owner, num in (
            (self.weapon_of, self.holder, len(self.cast.weapons)),
            (self.motive_of, self.feeler, len(self.cast.motives)),
        ):
            rules += [self.both(owned(s), w, owner(w), s) for s in range(self.num_suspects) for w in range(num)]
        return rules

    def murder(self, murderer: int, hour: int) -> list[Limit | Pair]:
        """The limits if this suspect is the murderer at this hour: alone with the victim, who stays there from then."""
        place = self.room(self.num_suspects, hour)
        others = [s for s in range(self.num_suspects) if s != murderer]
        limits: list[Limit | Pair] = [
            Limit(self.who, 1 << murderer),
            Limit(self.when, 1 << hour),
            self.same(self.where, place),
            self.same(self.room(murderer, hour), place),
            *(self.differ(self.room(other, hour), place) for other in others),
            *(self.same(self.room(self.num_suspects, h), place) for h in range(hour + 1, self.num_hours)),
        ]
        limits += [self.same(self.what, self.weapon_of(murderer))] if self.cast.weapons else []
        return limits + ([self.same(self.why, self.motive_of(murderer))] if self.cast.motives else [])

    def pair(self, x: int, y: int, allowed: frozenset[tuple[int, int]]) -> Pair:
        return Pair(x, y, _tables(self.sizes[x], self.sizes[y], allowed))

    def same(self, x: int, y: int) -> Pair:
        return self.pair(x, y, _same(min(self.sizes[x], self.sizes[y])))

    def differ(self, x: int, y: int) -> Pair:
        return self.pair(x, y, _differ(self.sizes[x], self.sizes[y]))

    def both(self, x: int, a: int, y: int, b: int) -> Pair:
        """x has value a exactly if y has value b."""
        return self.pair(x, y, _both(self.sizes[x], a, self.sizes[y], b))

    def follows(self, x: int, a: int, y: int, b: int) -> Pair:
        """If x has value a, then y has value b."""
        return self.pair(x, y, _follows(self.sizes[x], a, self.sizes[y], b))


@cache
def _same(size: int) -> frozenset[tuple[int, int]]:
    return frozenset((v, v) for v in range(size))


@cache
def _differ(x_size: int, y_size: int) -> frozenset[tuple[int, int]]:
    return frozenset((v, w) for v in range(x_size) for w in range(y_size) if v != w)


@cache
def _both(x_size: int, a: int, y_size: int, b: int) -> frozenset[tuple[int, int]]:
    return frozenset((v, w) for v in range(x_size) for w in range(y_size) if (v == a) == (w == b))


@cache
def _follows(x_size: int, a: int, y_size: int, b: int) -> frozenset[tuple[int, int]]:
    return frozenset((v, w) for v in range(x_size) for w in range(y_size) if v != a or w == b)


@cache
def _tables(x_size: int, y_size: int, allowed: frozenset[tuple[int, int]]) -> tuple[Table, Table]:
    def table(size: int, pairs: Iterable[tuple[int, int]]) -> Table:
        allowed_by = [0] * size
        for v, w in pairs:
            allowed_by[v] |= 1 << w
        result = [0]
        for v in range(size):  # the sets that have v as their largest value
            result += [allowed_by[v] | rest for rest in result[: 1 << v]]
        return result

    return table(x_size, allowed), table(y_size, ((w, v) for v, w in allowed))


def holds(limits: Limits, world: World) -> bool:
    """Whether a world keeps to the limits."""
    for limit in limits:
        if isinstance(limit, Limit):
            if not limit.values >> world[limit.variable] & 1:
                return False
        elif not limit.tables[0][1 << world[limit.x]] >> world[limit.y] & 1:
            return False
    return True


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
