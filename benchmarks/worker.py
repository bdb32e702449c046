"""The process that a benchmark runs in. A module of its own: what a spawned process is to call must be importable."""

from __future__ import annotations

import multiprocessing
import threading

import psutil


def end_with_parent() -> None:
    """A worker whose parent was killed would go on measuring, and disturb whatever is measured next."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        psutil.Process().kill()

    threading.Thread(target=watch, name="parent", daemon=True).start()
