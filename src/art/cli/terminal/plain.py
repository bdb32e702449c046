"""Lines on standard error, for commands that the core package has: it does not bring rich."""

from __future__ import annotations

import sys

from art.storage.log_lines import escape_control


class PlainLines:
    """Prints lines as `Screen` does, without styles."""

    def print(self, text: str, *, style: str | None = None, highlight: bool = False, soft_wrap: bool = True) -> None:
        print(escape_control(text), file=sys.stderr, flush=True)
