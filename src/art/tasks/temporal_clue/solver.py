"""Find a world that agrees with all clues and has other answers than expected, or prove that there is none.

Arc consistency (Mackworth, 1977, AC-3) drops values of a variable that no value of another one allows; this is a
look-up in a table for each pair. The rules of the murder depend on the murderer and the hour, so the solver supposes
each murderer and hour in turn, and then these rules are limits on pairs too. Where no limit decides, it searches with
backtracking, first on variables with few values that were often in conflict (after Boussemart et al., 2004, dom/wdeg):
otherwise a contradiction about motives would be found again for every way in which people can walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from art.tasks.temporal_clue.model import Limit, Limits, Model, Table, World


class Solver:
    """Search over the worlds of a model that keep to some clues."""

    def __init__(self, model: Model, clues: Limits) -> None:
        self.model = model
        self.num_assumptions = 0
        """Number of values that were tried where no limit decided; it counts over all searches of this solver."""
        self._start = _Worlds.all(model.sizes)
        self._weights = [1] * len(model.sizes)
        self._is_possible = self._keep_to(self._start, [*model.rules, *clues])

    def any_world(self) -> World | None:
        """Find a world that keeps to the clues."""
        return next((world for case in self._cases() for world in self._search(case)), None)

    def other_world(self, answers: Mapping[int, int]) -> World | None:
        """Find a world in which one of these variables has another value. `None` proves that there is none."""
        for case in self._cases():
            for variable, value in answers.items():
                other = case.copy()
                if self._keep_to(other, [Limit(variable, ~(1 << value))]):
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
                self.num_assumptions += 1
                assumed = worlds.copy()
                if self._keep_to(assumed, [Limit(variable, 1 << value)]):
                    yield from self._search(assumed)

    def _keep_to(self, worlds: _Worlds, limits: Limits) -> bool:
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
            if isinstance(limit, Limit):
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
