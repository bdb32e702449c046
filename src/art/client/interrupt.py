"""Ctrl-C in a program that trains: one line in place of the stacks of everything that was under way.

`asyncio.run` answers Ctrl-C by cancelling the program's task, and raises KeyboardInterrupt once that has ended. Python
would print it with some 80 lines of awaits. While a model is registered, `sys.excepthook` says instead where training
stands. A hook of somebody else, and `python -X dev`, keep the traceback.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from types import TracebackType

EXIT_INTERRUPTED = 130
"""What shells give a program that Ctrl-C ended."""
_steps: dict[str, int | None] = {}
"""The newest step of each model in use; `None` until it is known."""


def note_step(model: str, step: int | None) -> None:
    """Remember where `model` stands, for the case of Ctrl-C."""
    if sys.excepthook is sys.__excepthook__ and not sys.flags.dev_mode:
        sys.excepthook = _hook
    _steps[model] = step


def forget_steps(models: Iterable[str]) -> None:
    """The models are no longer in use, unless it is Ctrl-C that ends them now."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is None or not task.cancelling():
        for model in models:
            _steps.pop(model, None)


def stopped() -> str:
    """Example: "stopped at step 3"; with several models "stopped at step 3 of shop/a, at step 5 of shop/b"."""
    known = {model: step for model, step in _steps.items() if step is not None}
    places = [f"at step {step}" if len(known) == 1 else f"at step {step} of {model}" for model, step in known.items()]
    return " ".join(["stopped", ", ".join(places)]).rstrip()


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if _steps and issubclass(kind, KeyboardInterrupt):
        after_echo = "\n" if sys.stderr.isatty() else ""  # of ^C, which a terminal writes into the line
        sys.stderr.write(f"{after_echo}{stopped()}; run the same script again and it goes on\n")
    else:
        sys.__excepthook__(kind, error, traceback)
