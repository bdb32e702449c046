"""Delivery: reads the local log of a model and feeds its sinks, each in a thread of its own.

`choose_sinks` says which sinks a model has: those of its `report_metrics`, or those that the environment chooses. A
`Worker` is the thread of one sink: it delivers the log, repeats what failed after a pause, and closes the sink at the
end. `Reporting` is all sinks of one model: started together, asked for their state, closed.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art.errors import ConfigError, OverloadedError
from art.plugins import find_plugins, load_plugin
from art.sinks import LoggedGroups, Refused, Row, Run, Sink
from art.storage.atomic import write_file
from art.storage.jsonl import append_lines, encode, read_lines, read_lines_from
from art.storage.layout import ModelPaths
from art.storage.lock import take_lock
from art.storage.logs import plain_config
from art.storage.trajectories import parse_group
from art.trajectory import TrajectoryGroup

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Time to deliver what is left when a model is closed."""
CLOSE_FAILING_S = 5.0
"""Time for a tracker that failed already. What it does not get is sent by the next run."""
POLL_S = 2.0
"""The log is looked at this often for rows of other processes; this process wakes the worker."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses after a first failure, and after many: each is twice as long as the one before."""
CLOSING_PAUSE_S = 1.0
"""Longest pause while the sink is being closed."""
_STARTING = threading.Lock()
"""Held while a sink starts: several at once have failed, probably because their libraries import the same packages."""
PIECE_BYTES = 8 * 2**20
"""Groups are delivered in pieces of about this size, so that a large log does not fill the memory."""
_NO_METRICS = frozenset({"step", "training_step", "recorded_at"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_warned: set[str] = set()
"""Trackers that the environment names and that are not installed, once they were reported."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sink of a model, not started yet."""

    name: str
    make: Callable[[], Sink]
    why: str


def choose_sinks(
    report_metrics: Sequence[str | Callable[[], Sink]] | None, environment: Mapping[str, str] = os.environ
) -> list[Choice]:
    """Return the sinks of a model.

    Args:
        report_metrics: names of trackers, or classes of sinks (or functions that make one). `None` leaves the choice
            to the environment; an empty list chooses none.

    Raises:
        ConfigError: there is no such tracker, its package is not installed, or one is given twice.
    """
    if report_metrics is None:
        trackers = [load_tracker(name) for name in find_plugins("art.trackers")]
        return [choice for tracker in trackers if (choice := _chosen_by(environment, tracker)) is not None]
    choices = []
    for item in report_metrics:
        if isinstance(item, str):
            tracker = load_tracker(item)
            if not is_installed(tracker):
                raise ConfigError(
                    f"report_metrics has {item!r}, but the package {tracker.package!r} is not installed: "
                    f"{_how_to_install(tracker)}, or leave {item!r} out",
                    param="report_metrics",
                )
            choices.append(Choice(item, tracker, "`report_metrics` names it"))
            continue
        sink = item() if callable(item) else item
        if not callable(item) or not isinstance(sink, Sink) or not _NAME.fullmatch(getattr(sink, "name", "")):
            raise ConfigError(
                f"report_metrics has {item!r}; expected names of trackers, or subclasses of `art.sinks.Sink` whose "
                "`name` is made of letters, digits, '-' and '_'",
                param="report_metrics",
            )
        choices.append(Choice(sink.name, item, "`report_metrics` has it"))
    names = [choice.name for choice in choices]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"report_metrics has {', '.join(sorted(twice))} more than once", param="report_metrics")
    return choices


def load_tracker(name: str) -> type[Sink]:
    """Import the class of a tracker by its name. Its library is not imported.

    Raises:
        ConfigError: no installed package has such a tracker, or its entry point names something else.
    """
    trackers = find_plugins("art.trackers")
    if name not in trackers:
        raise ConfigError(
            f"report_metrics has {name!r}, which is no tracker; there are {', '.join(trackers)}. A tracker of your own "
            "is a subclass of `art.sinks.Sink`: pass the class instead of a name",
            param="report_metrics",
        )
    tracker = load_plugin("art.trackers", name)
    if not (isinstance(tracker, type) and issubclass(tracker, Sink) and tracker.name == name):
        raise ConfigError(
            f"the entry point {name!r} of the group 'art.trackers' ({trackers[name].value}) must be a subclass of "
            f"`art.sinks.Sink` with name = {name!r}"
        )
    return tracker


def is_installed(tracker: type[Sink]) -> bool:
    """Whether the library that a tracker needs is installed."""
    if tracker.package is None:
        return True
    try:
        spec = importlib.util.find_spec(tracker.package)
    except ModuleNotFoundError:  # not even the package around it
        return False
    # A folder of data, like the ./wandb that wandb makes, looks like a package but has no file of code.
    return spec is not None and (spec.origin is not None or "." in tracker.package)


def _chosen_by(environment: Mapping[str, str], tracker: type[Sink]) -> Choice | None:
    """The choice of a tracker whose variables are set; `None` if they are not, or its library is not installed."""
    is_set = [any(environment.get(name) for name in names.split("|")) for names in tracker.environment]
    is_off = any(environment.get(name, "").lower() == value for name, value in tracker.switched_off_by)
    if not is_set or not all(is_set) or is_off:
        return None
    variables = " and ".join(tracker.environment).replace("|", " or ")
    if is_installed(tracker):
        return Choice(tracker.name, tracker, f"{variables} is set; `report_metrics=[]` switches it off")
    if tracker.name not in _warned:
        _warned.add(tracker.name)
        logger.warning(
            "%s is set, but %s is not installed, so nothing is reported there: %s, or pass `report_metrics=[]`",
            variables, tracker.package, _how_to_install(tracker),
        )  # fmt: skip
    return None


def _how_to_install(tracker: type[Sink]) -> str:
    what = tracker.package if tracker.extra is None else f"'agent-reinforcement-trainer[{tracker.extra}]'"
    return f"pip install {what}"


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a file of the log."""

    offset: int = 0
    """Bytes of the file that were delivered, always whole lines."""
    count: int = 0
    """Number of its rows (or groups) that the tracker has. For the history it may include rows of an earlier
    log of the same run."""


class Cursor:
    """Positions of one sink in the files of the log, by their path relative to the model's folder.

    They are a file of JSON lines beside the log. The last line of each file of the log counts:

        {"file": "history.jsonl", "offset": 0, "count": 0}
        {"file": "trajectories/train/0001.jsonl", "offset": 48213, "count": 4}
        {"file": "history.jsonl", "offset": 913, "count": 1}

    A line is added after each delivery that the tracker has accepted, so a killed run continues where it was.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._positions = {
            str(row["file"]): Position(int(row["offset"]), int(row["count"]))
            for _, row in read_lines(path)
            if row is not None
        }

    def get(self, file: str) -> Position | None:
        """Return the position in a file; `None` if nothing was read of it."""
        return self._positions.get(file)

    def set(self, file: str, position: Position) -> None:
        """Save a position durably."""
        append_lines(self._path, [{"file": file, **asdict(position)}])
        self._positions[file] = position

    def rewind(self, file: str, position: Position) -> None:
        """Return to an earlier position in a file. All other files are read again from their beginning."""
        write_file(self._path, (encode({"file": file, **asdict(position)}) + "\n").encode())
        self._positions = {file: position}


@dataclass(frozen=True, slots=True)
class Delivery:
    """One call of a sink, and where the cursor is afterwards."""

    content: Row | LoggedGroups | None
    """`None`: there is nothing to send, because a line is damaged or the sink does not take it."""
    file: str
    after: Position


class LogReader:
    """Reads the log of one model for one sink: what it has not had yet, in the order in which it was logged.

    `model.log` writes groups first and then their row, so the row tells at which step to look for groups: before a row
    is delivered, all new groups of its step are.
    """

    def __init__(self, paths: ModelPaths, sink: Sink) -> None:
        self._paths, self._sink = paths, sink
        self._cursor = Cursor(paths.sinks / f"{sink.name}.jsonl")
        self._history = paths.history.name

    def align(self, num_rows: int | None) -> None:
        """Settle from which row to continue. `num_rows` is the number of rows that the tracker has; `None`: unknown.

        The cursor gives way to the tracker: a run that was killed between an accepted row and its cursor does not
        send the row again, and rows that the tracker has lost since are sent again.
        """
        place, size = self._cursor.get(self._history), _size(self._paths.history)
        if place is None or place.offset > size:  # the first time, or the log was removed and began again
            known = 0 if place is None else place.count
            if num_rows:
                logger.info(
                    "%s has %d rows of this run from an earlier log, and continues it", self._sink.name, num_rows
                )
            self._cursor.rewind(self._history, Position(0, known if num_rows is None else num_rows))
        elif num_rows is not None and num_rows < place.count:
            self._cursor.rewind(self._history, self._position_of(num_rows, place))
        elif num_rows is not None and num_rows > place.count:
            self._cursor.set(self._history, self._position_of(num_rows, place))

    def _position_of(self, num_rows: int, place: Position) -> Position:
        """Position in the history after which the tracker has `num_rows` rows of the run."""
        ends = [end for row, end in read_lines_from(self._paths.history, 0) if row is not None]
        earlier = place.count - sum(end <= place.offset for end in ends)  # rows from a log before this one
        of_log = min(max(num_rows - earlier, 0), len(ends))
        return Position(ends[of_log - 1] if of_log else 0, num_rows)

    def pending(self) -> Iterator[Delivery]:
        """Yield what to deliver next, until the end of the log. Call `done` for each before taking the next."""
        place = self._cursor.get(self._history) or Position()
        for row, end in read_lines_from(self._paths.history, place.offset):
            if row is None:
                yield Delivery(None, self._history, Position(end, place.count))
                continue
            if self._sink.takes_groups:
                step = _step_of(row)
                for folder in sorted(self._paths.all_trajectories.glob("*/")):
                    yield from self._pieces(self._paths.trajectories(folder.name, step), folder.name, step)
            when = row.get("recorded_at")
            recorded_at = datetime.fromisoformat(when).astimezone(UTC) if isinstance(when, str) else datetime.now(UTC)
            metrics = {
                key: value
                for key, value in row.items()
                if key not in _NO_METRICS and isinstance(value, (int, float)) and not isinstance(value, bool)
                if math.isfinite(value)
            }
            content = Row(number=place.count, step=_step_of(row), recorded_at=recorded_at, metrics=metrics)
            place = Position(end, place.count + 1)
            yield Delivery(content, self._history, place)

    def done(self, delivery: Delivery) -> None:
        """Move the cursor past a delivery."""
        self._cursor.set(delivery.file, delivery.after)

    def num_pending_rows(self) -> int:
        """Count the rows of the history that were not delivered."""
        place = self._cursor.get(self._history) or Position()
        return sum(1 for _ in read_lines_from(self._paths.history, place.offset))

    def _pieces(self, path: Path, split: str, step: int) -> Iterator[Delivery]:
        """Yield the groups of a file that are new, in pieces."""
        file = path.relative_to(self._paths.root).as_posix()
        place = self._cursor.get(file) or Position()
        if _size(path) <= place.offset:
            return
        groups: list[TrajectoryGroup] = []
        first, start = place.count, place.offset
        lines = itertools.chain(read_lines_from(path, place.offset), [(None, -1)])
        for line, end in lines:
            is_last = end < 0
            if not is_last:
                group = None
                try:
                    group = None if line is None else parse_group(line)
                except (ValueError, TypeError, AttributeError) as error:  # `ValidationError` is a `ValueError`
                    logger.warning("a line of %s is not a trajectory group, so sinks do not get it: %s", path, error)
                groups += [] if group is None else [group]
                place = Position(end, place.count + 1)
            if (is_last and place.offset > start) or place.offset - start >= PIECE_BYTES:
                content = LoggedGroups(split=split, step=step, first=first, groups=groups) if groups else None
                yield Delivery(content, file, place)
                groups, first, start = [], place.count, place.offset


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _step_of(row: dict[str, Any]) -> int:
    return int(row.get("step", row.get("training_step", 0)))


class Worker:
    """Delivers one model's log to one sink, in a thread that ends with `close` or with the process.

    Of all workers with the same log and tracker, in all processes, one delivers; the others wait to take its place.
    """

    def __init__(self, make_sink: Callable[[], Sink], name: str, paths: ModelPaths, run: Run) -> None:
        self.name = name
        self._make_sink, self._paths, self._run = make_sink, paths, run
        self._reader: LogReader | None = None
        self._sink: Sink | None = None
        self._config: Mapping[str, Any] | None = None
        """The run's config, if the sink does not have its newest form."""
        self._lock: int | None = None
        self.wake = threading.Event()
        """Set it to have the log looked at now."""
        self._has_started = threading.Event()
        self._closing = threading.Event()
        self._start_error: BaseException | None = None
        self._deadline: float | None = None
        """Time at which the thread ends, on the monotonic clock, once it was told to."""
        self.failure: str | None = None
        """The latest error, while deliveries fail."""
        self.thread = threading.Thread(target=self._work, name=f"art-sink-{name}", daemon=True)

    # --- for other threads ---

    def wait_until_started(self) -> None:
        """Wait until the sink has started, or another process is known to deliver this log.

        Raises:
            ConfigError: the sink cannot start.
        """
        self._has_started.wait()
        error = self._start_error
        if error is None:
            return
        if isinstance(error, ConfigError):
            raise error
        raise ConfigError(
            f"{self.name} cannot start ({type(error).__name__}: {error}). See docs/trackers.md, or leave it out of "
            "`report_metrics`"
        ) from error

    def configure(self, config: Mapping[str, Any]) -> None:
        """Give the run's config to the sink before the next row."""
        if config != self._run.config:
            self._run = replace(self._run, config=config)
            self._config = config
            self.wake.set()

    def num_waiting(self) -> int:
        """Count the rows of the history that the tracker has not accepted; 0 if another process delivers them."""
        reader = self._reader
        return 0 if reader is None else reader.num_pending_rows()

    def begin_closing(self, timeout_s: float) -> None:
        """Tell the thread to deliver what is left, and to end after at most `timeout_s` seconds."""
        self._deadline = time.monotonic() + timeout_s
        self._closing.set()
        self.wake.set()

    def join(self) -> None:
        """Wait until the thread has ended or its time is over. A thread that hangs in its tracker is left alone."""
        if self._deadline is not None:
            self.thread.join(max(self._deadline - time.monotonic(), 0) + 1)

    # --- the thread ---

    def _work(self) -> None:
        try:
            self._open()
        except BaseException as error:
            self._start_error = error
            logger.debug("%s cannot start", self.name, exc_info=True)
            self._release()
            return
        finally:
            self._has_started.set()
        failures = 0
        while True:
            self.wake.clear()
            is_last_pass = self._deadline is not None  # rows logged before `begin_closing` are in this pass
            try:
                self._open()
                has_all = self._deliver()
            except Exception as error:
                failures += 1
                if self.failure is None:
                    logger.warning(
                        "%s does not accept metrics (%s: %s). Training goes on; the log keeps them, and they are sent "
                        "again after a pause", self.name, type(error).__name__, error,
                    )  # fmt: skip
                self.failure = f"{type(error).__name__}: {error}"
                asked_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
                pause_s = max(asked_s, min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S))
                if self._closing.wait(pause_s) and self._deadline is not None:  # shorter while the sink is closed
                    left_s = max(self._deadline - time.monotonic(), 0.0)
                    time.sleep(min(CLOSING_PAUSE_S, pause_s, left_s))
                if self._deadline is not None and time.monotonic() > self._deadline:
                    break
            else:
                failures = 0
                if has_all:
                    self._note_success()
                if is_last_pass:
                    break
                self.wake.wait(POLL_S)
        self._close_sink()
        self._release()

    def _open(self) -> None:
        """Start the sink, unless it has started or another process delivers this log."""
        if self._sink is not None:
            return
        if self._lock is None:
            self._lock = take_lock(self._paths.sinks / f"{self.name}.lock")
        if self._lock is None:
            return
        sink = self._make_sink()
        with _STARTING:
            num_rows = sink.start(self._run)
        self._reader = LogReader(self._paths, sink)
        self._reader.align(num_rows)
        self._sink = sink

    def _deliver(self) -> bool:
        """Send what waits; False if the time to close was over before all of it was sent."""
        if self._reader is None:
            return True
        if (config := self._config) is not None:
            assert self._sink is not None
            try:
                self._sink.configure(config)
            except Refused as error:
                logger.warning("%s refused settings of the run: %s", self.name, error)
            self._config = None if self._config is config else self._config
        for delivery in self._reader.pending():
            if self._deadline is not None and time.monotonic() > self._deadline:
                return False
            self._send(delivery.content)
            self._reader.done(delivery)
            self._note_success()
        return True

    def _send(self, content: Row | LoggedGroups | None) -> None:
        assert self._sink is not None
        try:
            if isinstance(content, Row):
                self._sink.metrics(content)
            elif isinstance(content, LoggedGroups):
                self._sink.groups(content)
        except Refused as error:
            what = f"row {content.number} (step {content.step})" if isinstance(content, Row) else "groups"
            if isinstance(content, LoggedGroups):
                what = f"{len(content.groups)} groups of {content.split}, step {content.step}"
            logger.warning("%s refused %s, which is lost there: %s", self.name, what, error)

    def _note_success(self) -> None:
        if self.failure is not None:
            logger.warning("%s accepts metrics again", self.name)
        self.failure = None

    def _close_sink(self) -> None:
        if self._sink is None or self._deadline is None:
            return
        try:
            self._sink.close(max(self._deadline - time.monotonic(), 1.0))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            logger.warning("%s did not close properly: %s", self.name, self.failure)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Reporting:
    """Feeds the sinks of one model from its log."""

    def __init__(self, paths: ModelPaths, config: Mapping[str, Any], choices: Sequence[Choice]) -> None:
        """Start the sinks, and say in the log which and why. It blocks until each is connected.

        Args:
            config: what trackers are told about the run; `project` and `name` identify it.

        Raises:
            ConfigError: a sink cannot start. Those that started are closed.
        """
        project, name = config["project"], config["name"]
        paths.sinks.mkdir(parents=True, exist_ok=True)
        run = Run(project=project, name=name, folder=paths.sinks, config=plain_config(config))
        self._workers = [Worker(choice.make, choice.name, paths, run) for choice in choices]
        for choice in choices:
            logger.info("metrics of %s/%s go to %s, because %s", project, name, choice.name, choice.why)
        for worker in self._workers:
            worker.thread.start()
        try:
            for worker in self._workers:
                worker.wait_until_started()
        except BaseException:
            self.close(CLOSE_FAILING_S)
            raise
        # Registered last and so called first: before the trackers' libraries close by themselves.
        atexit.register(self.close)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Give the sinks the run's config if it has changed."""
        plain = plain_config(config)
        for worker in self._workers:
            worker.configure(plain)

    def wake(self) -> None:
        """Deliver what was just logged."""
        for worker in self._workers:
            worker.wake.set()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Deliver what is left and close all sinks. What could not be delivered is said in a warning."""
        for worker in self._workers:
            worker.begin_closing(timeout_s if worker.failure is None else min(timeout_s, CLOSE_FAILING_S))
        for worker in self._workers:
            worker.join()
            if waiting := worker.num_waiting():
                logger.warning(
                    "%s did not get %d rows%s. They stay in the log, and the next run of this model sends them",
                    worker.name, waiting, "" if worker.failure is None else f" ({worker.failure})",
                )  # fmt: skip
        atexit.unregister(self.close)
