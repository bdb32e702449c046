"""How far a step has come, reported after every micro-batch."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Called with (micro-batches done, total number of micro-batches); both count this process only."""


class Progress:
    """Counts micro-batches. Passes that only measure report (0, 1): nothing is trained yet, but the step is alive."""

    def __init__(self, report: OnProgress | None = None) -> None:
        self._report = report
        self._num_done = 0
        self._num_expected = 0

    def expect(self, num_micro_batches: int) -> None:
        """Begin to count. Called when the micro-batches that train are known."""
        self._num_expected = num_micro_batches

    def tick(self) -> None:
        """One micro-batch is done. An update that starts again on smaller ones may do more than were expected."""
        if self._num_expected:
            self._num_done = min(self._num_done + 1, self._num_expected)
        if self._report is not None:
            self._report(self._num_done, self._num_expected or 1)
