"""CSV: one line for each metric of each row, for a spreadsheet or pandas."""

from __future__ import annotations

import csv
import io

from art.sinks import Row, Run, Sink

COLUMNS = ("row", "step", "recorded_at", "metric", "value")


class CsvSink(Sink):
    """Writes `sinks/csv/metrics.csv` in the model's log."""

    name = "csv"

    def start(self, run: Run) -> int:
        folder = run.folder / "csv"
        folder.mkdir(exist_ok=True)
        self._file = (folder / "metrics.csv").open("a+", encoding="utf-8", newline="")
        self._file.seek(0)
        numbers = [int(line["row"]) for line in csv.DictReader(self._file)]
        if self._file.tell() == 0:
            self._write([COLUMNS])
        return numbers[-1] + 1 if numbers else 0

    def metrics(self, row: Row) -> None:
        when = row.recorded_at.isoformat()
        self._write([(row.number, row.step, when, name, value) for name, value in row.metrics.items()])

    def close(self, timeout_s: float) -> None:
        self._file.close()

    def _write(self, lines: list[tuple[object, ...]]) -> None:
        """Append lines at once, so that a killed process leaves the lines of a row whole or not at all."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows(lines)
        self._file.write(text.getvalue())
        self._file.flush()
