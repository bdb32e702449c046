"""Ctrl-C in a program that trains prints one line instead of the stacks of everything that was running.

`asyncio.run` answers Ctrl-C by cancelling the program's task, and raises KeyboardInterrupt once that has ended. Python
would print it with some 80 lines of awaits. While a model is registered, `sys.excepthook` prints the step of the
training instead. Another library's hook, and `python -X dev`, keep the traceback.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from types import TracebackType

EXIT_INTERRUPTED = 130
"""Exit status that shells give to a program that Ctrl-C ended."""
_steps: dict[str, int | None] = {}
"""The newest step of each model in use; `None` until it is known."""


def note_step(model: str, step: int | None) -> None:
    """Remember the step that `model` is at, to print it after Ctrl-C."""
    if sys.excepthook is sys.__excepthook__ and not sys.flags.dev_mode:
        sys.excepthook = _hook
    _steps[model] = step


def forget_steps(models: Iterable[str]) -> None:
    """Forget models that are no longer in use, unless Ctrl-C is ending the program now."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is None or not task.cancelling():
        for model in models:
            _steps.pop(model, None)


def stopped() -> str:
    """Return the line for Ctrl-C: "stopped at step 3", or "stopped at step 3 of shop/a, at step 5 of shop/b"."""
    known = {model: step for model, step in _steps.items() if step is not None}
    places = [f"at step {step}" if len(known) == 1 else f"at step {step} of {model}" for model, step in known.items()]
    return " ".join(["stopped", ", ".join(places)]).rstrip()


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if _steps and issubclass(kind, KeyboardInterrupt):
        after_echo = "\n" if sys.stderr.isatty() else ""  # a terminal has written ^C into the line
        sys.stderr.write(f"{after_echo}{stopped()}; run the same script again and it goes on\n")
    else:
        sys.__excepthook__(kind, error, traceback)
