"""Report how far a step has come after every micro-batch."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Function that is called with (micro-batches done, micro-batches in total), both of this process only."""


class Progress:
    """Counts finished micro-batches of a step and reports them. Passes that only measure are reported as (0, 1)."""

    def __init__(self, report: OnProgress | None = None) -> None:
        self._report = report
        self._num_done = 0
        self._num_expected = 0

    def expect(self, num_micro_batches: int) -> None:
        """Begin to count, once the number of micro-batches that train is known."""
        self._num_expected = num_micro_batches

    def tick(self) -> None:
        """Count and report one micro-batch. An update that starts again on smaller ones may do more than expected."""
        if self._num_expected:
            self._num_done = min(self._num_done + 1, self._num_expected)
        if self._report is not None:
            self._report(self._num_done, self._num_expected or 1)
