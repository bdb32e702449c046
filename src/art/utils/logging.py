"""Lines with a time and a coloured label, as notebooks print them: `info`, `step`, `ok`, `warn`, `err` and `dim`."""

from __future__ import annotations

import sys
from datetime import datetime
from functools import partial


def _say(label: str, color: int, message: object) -> None:
    sys.stdout.write(f"[{datetime.now():%H:%M:%S}] \x1b[{color}m{label:<5}\x1b[0m {message}\n")


info, step, ok = partial(_say, "INFO", 34), partial(_say, "STEP", 36), partial(_say, "OK", 32)
warn, err = partial(_say, "WARN", 33), partial(_say, "ERR", 31)


def dim(message: object) -> None:
    """Print a line in a faint colour, without time or label."""
    sys.stdout.write(f"\x1b[2m{message}\x1b[0m\n")
