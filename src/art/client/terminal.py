"""What a program shows while it waits, and when Ctrl-C ends it.

`asyncio.run` answers Ctrl-C by cancelling the program's task, and raises KeyboardInterrupt once that has ended. Python
would print it with some 80 lines of awaits. While a model is registered, `sys.excepthook` prints the step of the
training instead. Another library's hook, and `python -X dev`, keep the traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from art.protocol.training import JobKind, JobStatus

logger = logging.getLogger(__name__)

SILENCE_S = 30.0
LONGEST_SILENCE_S = 600.0


@contextlib.contextmanager
def announce_wait(
    what: str | Callable[[], str], *, every_s: float = SILENCE_S, longest_s: float = LONGEST_SILENCE_S
) -> Iterator[None]:
    """Context manager: log `what` the body waits for after `every_s` seconds, and again at doubling intervals.

    No interval is longer than `longest_s`.

    The log level is warning, because programs that have not set up logging show nothing below it.
    """
    loop = asyncio.get_running_loop()
    start = time.monotonic()
    timer: asyncio.TimerHandle

    def announce() -> None:
        nonlocal timer
        waited_s = time.monotonic() - start
        logger.warning("still waiting for %s (%.0f s)", what if isinstance(what, str) else what(), waited_s)
        timer = loop.call_later(min(waited_s, longest_s), announce)

    timer = loop.call_later(every_s, announce)
    try:
        yield
    finally:
        timer.cancel()


RENEWAL_S = 0.25
_lines: list[ProgressLine] = []
"""The lines in use, the innermost last: that one is shown."""


class ProgressLine:
    """Says on standard error how far the work in its `with` block is: `steps 12/30, 4 min left  reward 0.41`.

    In a terminal this is one line that is renewed. Elsewhere it is printed whenever nothing else was for `SILENCE_S`
    seconds. What is printed meanwhile must be printed in `above_progress`.
    """

    def __init__(self, what: str = "") -> None:
        """
        Args:
            what: the work in a few words. Nothing is shown while it is empty.
        """
        self._is_terminal = sys.stderr.isatty()
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._shown = ""
        self._thread = threading.Thread(target=self._renew, name="progress", daemon=True)
        self.begin(what)

    def begin(self, what: str, done: int = 0, total: int = 0) -> None:
        """Go over to other work. Its pace is measured from now, when `done` parts of `total` are done."""
        with self._lock:
            self.what, self.done, self.total, self.detail = what, done, total, ""
            self._began = self._updated = self._printed_at = time.monotonic()
            self._first = done

    def update(self, done: int, total: int, detail: str = "") -> None:
        """Say how many parts of the work are done, of how many, and what else there is to say."""
        with self._lock:
            self.done, self.total, self.detail = done, total, detail
            self._updated = time.monotonic()

    def text(self) -> str:
        """The line as it is now, without control characters."""
        now = time.monotonic()
        line = f"{self.what} {self.done}/{self.total}" if self.total else f"{self.what}, {_about(now - self._began)}"
        if self._first < self.done < self.total:
            pace_s = (self._updated - self._began) / (self.done - self._first)
            line += f", {_about(max(0.0, pace_s * (self.total - self.done) - (now - self._updated)))} left"
        line += f"  {self.detail}" if self.detail else ""
        return "".join(char if char.isprintable() else "?" for char in line)

    def __enter__(self) -> Self:
        if _lines:
            _lines[-1].erase()
        _lines.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.erase()
        _lines.remove(self)

    def erase(self) -> None:
        with self._lock:
            if self._shown:
                _write(f"\r{' ' * len(self._shown)}\r")
            self._shown, self._printed_at = "", time.monotonic()

    def _renew(self) -> None:
        while not self._ended.wait(RENEWAL_S if self._is_terminal else min(1.0, SILENCE_S)):
            with self._lock:
                if not self.what or _lines[-1] is not self:
                    continue
                if self._is_terminal:
                    line = self.text()[: shutil.get_terminal_size().columns - 1]
                    _write(f"\r{line.ljust(len(self._shown))}")
                    self._shown = line
                elif time.monotonic() - self._printed_at >= SILENCE_S:
                    self._printed_at = time.monotonic()
                    _write(f"{self.text()}\n")


def _about(seconds: float) -> str:
    """Write seconds without what nobody needs to know of work that goes on: `40 s`, `4 min` or `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


@contextlib.contextmanager
def above_progress() -> Iterator[None]:
    """Context manager: print in the body what would else run into the line of a `ProgressLine`."""
    with contextlib.ExitStack() as stack:
        if _lines:
            stack.enter_context(_lines[-1]._lock)
            _lines[-1].erase()
        yield


def note_detail(text: str) -> None:
    """Say more about the work whose `ProgressLine` is shown, if one is."""
    if _lines:
        _lines[-1].detail = text


def progress_bar(description: str | None, total: int, *, leave: bool = True) -> Any:
    """A tqdm bar to use in a `with`; it shows nothing without a description."""
    from tqdm.auto import tqdm

    return tqdm(desc=description, total=total, disable=description is None, leave=leave)


_NAMES = {"train": "training", "train_sft": "supervised fine-tuning"}
"""Names of jobs in messages, where they are not those of their kind."""


def describe_job(kind: JobKind, project: str, name: str) -> str:
    """Name a job in messages, e.g. "training of p/m"."""
    return f"{_NAMES.get(kind, f'the {kind}')} of {project}/{name}"


class JobView:
    """Shows the user a job for which a call waits, in words and as a progress bar."""

    def __init__(self, what: str, *, show: bool = False) -> None:
        self.what = what
        self._detail = ""
        self.shows_bar = show
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def describe(self) -> str:
        """Describe the job in words, e.g. "training of p/m (queued at place 2)"."""
        return f"{self.what} ({self._detail})" if self._detail else self.what

    def update(self, now: JobStatus) -> None:
        if now.queue_place is not None:
            self._detail = f"queued at place {now.queue_place}"
        elif now.progress is None:
            self._detail = now.state
        else:
            progress = now.progress
            self._detail = f"{progress.phase}: {progress.done} of {progress.total}"
            if self.shows_bar:
                if self._bar is None:
                    self._bar = progress_bar(self.what, 0, leave=False)
                self._bar.total, self._bar.n = progress.total, progress.done
                self._bar.set_postfix_str(progress.phase)
        note_detail(self._detail if now.state in ("queued", "running") else "")


# -- Ctrl-C --

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
