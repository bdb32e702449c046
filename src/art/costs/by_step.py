"""Sum the rows of a `costs.jsonl` by source and by step, without booking anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from art.costs.amount import Amount
from art.costs.ledger import full_name


class StepAmounts:
    """Amounts of one file by step and source. `Ledger` says what the rows are."""

    def __init__(self) -> None:
        self._open: defaultdict[str, Amount] = defaultdict(Amount)
        self._closed: defaultdict[int, defaultdict[str, Amount]] = defaultdict(lambda: defaultdict(Amount))

    def fold(self, row: Mapping[str, Any]) -> None:
        """Add a row.

        Raises:
            ValueError: it is not a row of such a file.
        """
        source, split, step = row.get("source"), row.get("closed"), row.get("step")
        if isinstance(source, str):
            numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
            self._open[source] += Amount.from_row(numbers)
        elif isinstance(split, str) and isinstance(step, int):
            for name, amount in self._open.items():
                self._closed[step][full_name(name, split)] += amount
            self._open.clear()
        else:
            raise ValueError("a row of costs has a source, or ends a step")

    def totals(self) -> dict[str, Amount]:
        """All amounts by source. What no step has ended yet has no split as first part of its source."""
        totals: defaultdict[str, Amount] = defaultdict(Amount)
        for amounts in [*self._closed.values(), self._open]:
            for source, amount in amounts.items():
                totals[source] += amount
        return dict(totals)

    def by_step(self) -> dict[int, dict[str, Amount]]:
        """The amounts that steps have ended, by step and source."""
        return {step: dict(amounts) for step, amounts in self._closed.items()}
