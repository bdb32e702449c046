"""Finds worlds that keep to the rules of a case and to its clues, or proves that there is none.

A world is a value for each variable of a `CaseModel`: who is where at each hour, who carries what and why, and the five
facts of the murder. The possible values of a variable are the bits of an integer. Every rule and every clue is a limit
on one variable or on a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

VICTIM = "Marlow"


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


Table = list[int]
"""`table[values of x]` is the set of values of y that at least one of these values of x allows."""
World = tuple[int, ...]
"""A value for each variable of a model."""


@dataclass(frozen=True, slots=True)
class ValueLimit:
    """A limit on one variable: its value is one of `values`, a set of bits."""

    variable: int
    values: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A limit on two variables, given by tables for both directions."""

    x: int
    y: int
    tables: tuple[Table, Table]


Limits = Iterable["ValueLimit | Pair"]


class CaseModel:
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

    def has_owner(self, owner: int) -> ValueLimit:
        """The limit that a suspect has this weapon or motive. `owner` is a holder or feeler."""
        return ValueLimit(owner, (1 << self.num_suspects) - 1)

    @cached_property
    def rules(self) -> list[ValueLimit | Pair]:
        """The limits of every puzzle: people walk through doors, and each suspect has a weapon and a motive alone."""
        rules: list[ValueLimit | Pair] = []
        for person in range(len(self.cast.people)):
            for hour in range(self.num_hours - 1):
                rooms = self.room(person, hour), self.room(person, hour + 1)
                rules.append(self.pair(*rooms, "near", len(self.cast.rooms)))
        for owned, owner, num in (
            (self.weapon_of, self.holder, len(self.cast.weapons)),
            (self.motive_of, self.feeler, len(self.cast.motives)),
        ):
            rules += [self.pair(owned(s), owner(w), "both", w, s) for s in range(self.num_suspects) for w in range(num)]
        return rules

    def murder(self, murderer: int, hour: int) -> list[ValueLimit | Pair]:
        """The limits if this suspect is the murderer at this hour: alone with the victim, who stays there from then."""
        place = self.room(self.num_suspects, hour)
        others = [s for s in range(self.num_suspects) if s != murderer]
        limits: list[ValueLimit | Pair] = [
            ValueLimit(self.who, 1 << murderer),
            ValueLimit(self.when, 1 << hour),
            self.same(self.where, place),
            self.same(self.room(murderer, hour), place),
            *(self.pair(self.room(other, hour), place, "differ") for other in others),
            *(self.same(self.room(self.num_suspects, h), place) for h in range(hour + 1, self.num_hours)),
        ]
        limits += [self.same(self.what, self.weapon_of(murderer))] if self.cast.weapons else []
        return limits + ([self.same(self.why, self.motive_of(murderer))] if self.cast.motives else [])

    def same(self, x: int, y: int) -> Pair:
        return self.pair(x, y, "same")

    def pair(self, x: int, y: int, relation: str, a: int = 0, b: int = 0) -> Pair:
        return Pair(x, y, _tables(relation, self.sizes[x], self.sizes[y], a, b))


_RELATIONS: dict[str, Callable[[int, int, int, int], bool]] = {
    "same": lambda v, w, a, b: v == w,
    "differ": lambda v, w, a, b: v != w,
    "near": lambda v, w, a, b: (v - w) % a in (0, 1, a - 1),
    "both": lambda v, w, a, b: (v == a) == (w == b),
    "follows": lambda v, w, a, b: v != a or w == b,
}
"""Whether the value v of a variable and w of another fit. `near`: two of `a` rooms are the same or have a door between
them. `both`: v is a exactly if w is b. `follows`: if v is a, then w is b."""


@cache
def _tables(relation: str, x_size: int, y_size: int, a: int, b: int) -> tuple[Table, Table]:
    allowed = [(v, w) for v in range(x_size) for w in range(y_size) if _RELATIONS[relation](v, w, a, b)]

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
        if isinstance(limit, ValueLimit):
            if not limit.values >> world[limit.variable] & 1:
                return False
        elif not limit.tables[0][1 << world[limit.x]] >> world[limit.y] & 1:
            return False
    return True


class Solver:
    """Search over the worlds of a model that keep to some clues."""

    def __init__(self, model: CaseModel, clues: Limits) -> None:
        self.model = model
        self._start = _Worlds.all(model.sizes)
        self._weights = [1] * len(model.sizes)
        self._is_possible = self._keep_to(self._start, [*model.rules, *clues])

    def other_world(self, answers: Mapping[int, int]) -> World | None:
        """Find a world in which one of these variables has another value. `None` proves that there is none."""
        for case in self._cases():
            for variable, value in answers.items():
                other = case.copy()
                if self._keep_to(other, [ValueLimit(variable, ~(1 << value))]):
                    world = next(self._search(other), None)
                    if world is not None:
                        return world
        return None

    def _cases(self) -> Iterator[_Worlds]:
        """The worlds for each murderer and hour that the limits leave possible."""
        if not self._is_possible:
            return
        for murderer in range(len(self.model.cast.suspects)):
            for hour in range(len(self.model.cast.hours)):
                case = self._start.copy()
                if self._keep_to(case, self.model.murder(murderer, hour)):
                    yield case

    def _search(self, worlds: _Worlds) -> Iterator[World]:
        undecided = [variable for variable, values in enumerate(worlds.values) if values & (values - 1)]
        if not undecided:
            yield tuple(values.bit_length() - 1 for values in worlds.values)
            return
        variable = min(undecided, key=lambda v: worlds.values[v].bit_count() / self._weights[v])
        for value in range(self.model.sizes[variable]):
            if worlds.values[variable] >> value & 1:
                assumed = worlds.copy()
                if self._keep_to(assumed, [ValueLimit(variable, 1 << value)]):
                    yield from self._search(assumed)

    def _keep_to(self, worlds: _Worlds, limits: Limits) -> bool:
        """Limit the worlds, and note a variable without a value: the search tries such variables first."""
        conflict = worlds.keep_to(limits)
        if conflict is not None:
            self._weights[conflict] += 1
        return conflict is None


@dataclass(slots=True)
class _Worlds:
    """A set of worlds: the values that each variable may still have, and the limits on pairs as tables by variable."""

    values: list[int]
    pairs: list[list[tuple[int, Table]]]

    @classmethod
    def all(cls, sizes: list[int]) -> _Worlds:
        return cls([(1 << size) - 1 for size in sizes], [[] for _ in sizes])

    def copy(self) -> _Worlds:
        return _Worlds(self.values.copy(), self.pairs.copy())

    def keep_to(self, limits: Limits) -> int | None:
        """Drop the values that no longer fit, until every pair of variables is consistent.

        Returns:
            A variable that no value is left for; `None` if all have some.
        """
        values, pairs = self.values, self.pairs
        changed = set()
        for limit in limits:
            if isinstance(limit, ValueLimit):
                changed.add(limit.variable)
                values[limit.variable] &= limit.values
            else:
                changed |= {limit.x, limit.y}
                pairs[limit.x] = [*pairs[limit.x], (limit.y, limit.tables[0])]
                pairs[limit.y] = [*pairs[limit.y], (limit.x, limit.tables[1])]
        for x in changed:
            if not values[x]:
                return x
        while changed:
            x = changed.pop()
            values_of_x = values[x]
            for y, table in pairs[x]:
                left = values[y] & table[values_of_x]
                if left != values[y]:
                    if not left:
                        return y
                    values[y] = left
                    changed.add(y)
        return None
