"""For all tests. Its presence also puts `tests/` on the import path, so that test folders can share helper modules."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that; some tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
