"""Delivery: reads the local log of a model and feeds its sinks, each in a thread of its own.

A `Worker` is the thread of one sink: it delivers the log, repeats what failed after a pause, and closes the sink at the
end. `Reporting` is all sinks of one model: started together, asked for their state, closed.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from art.errors import ConfigError, OverloadedError
from art.sinks.choose import Choice, plain_config
from art.sinks.log_reader import Delivery, LogReader
from art.sinks.sink import Artefact, LoggedGroups, Refused, Row, Run, Sink
from art.storage.layout import ModelPaths
from art.storage.lock import take_lock

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Time to deliver what is left when a model is closed."""
CLOSE_FAILING_S = 5.0
"""Time for a tracker that failed already. What it does not get is sent by the next run."""
MANY = 20
"""Rows waiting for a slow tracker beyond which the log says so."""
_STARTING = threading.Lock()
"""Held while a sink starts: several at once have failed, probably because their libraries import the same packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Times of a worker, in seconds."""

    poll_s: float = 2.0
    """The log is looked at this often for rows of other processes; this process wakes the worker."""
    first_s: float = 1.0
    """Pause after a first failure; each further one is twice as long."""
    longest_s: float = 60.0
    closing_s: float = 1.0
    """Longest pause while the sink is being closed."""


class Worker:
    """Delivers one model's log to one sink, in a thread that ends with `close` or with the process.

    Of all workers with the same log and tracker, in all processes, one delivers; the others wait to take its place.
    """

    def __init__(self, make_sink: Callable[[], Sink], name: str, paths: ModelPaths, run: Run, pauses: Pauses) -> None:
        self.name = name
        self._make_sink, self._paths, self._run, self._pauses = make_sink, paths, run, pauses
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
        self.num_lost = 0
        """Rows, groups (or rollouts) and artefacts that the tracker refused or that were damaged, since the start."""
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

    @property
    def takes_artefacts(self) -> bool:
        """Whether the sink takes files, as far as is known."""
        return self._sink is None or self._sink.takes_artefacts

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
                self._note_failure(error)
                asked_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
                self._pause(max(asked_s, min(self._pauses.first_s * 2.0 ** (failures - 1), self._pauses.longest_s)))
                if self._deadline is not None and time.monotonic() > self._deadline:
                    break
            else:
                failures = 0
                if has_all:
                    self._note_success()
                if is_last_pass:
                    break
                self.wake.wait(self._pauses.poll_s)
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
            self._send(delivery)
            self._reader.done(delivery)
            self._note_success()
        return True

    def _send(self, delivery: Delivery) -> None:
        assert self._sink is not None
        self.num_lost += delivery.num_damaged
        content = delivery.content
        try:
            if isinstance(content, Row):
                self._sink.metrics(content)
            elif isinstance(content, LoggedGroups):
                self._sink.groups(content)
            elif isinstance(content, Artefact):
                if not content.path.exists():
                    raise Refused(f"{content.path} does not exist any more")
                self._sink.artefact(content)
        except Refused as error:
            whole = len(content.groups) if isinstance(content, LoggedGroups) else 1
            self.num_lost += whole if error.num_lost is None else error.num_lost
            part = "" if error.num_lost is None else "a part of "
            logger.warning("%s refused %s%s, which is lost there: %s", self.name, part, _describe(content), error)

    def _pause(self, pause_s: float) -> None:
        """Pause after a failure, for a shorter time while the sink is being closed."""
        if not self._closing.wait(pause_s) or self._deadline is None:
            return
        time.sleep(min(self._pauses.closing_s, pause_s, max(self._deadline - time.monotonic(), 0.0)))

    def _note_failure(self, error: Exception) -> None:
        if self.failure is None:
            logger.warning(
                "%s does not accept metrics (%s: %s). Training goes on; the log keeps them, and they are sent again "
                "after a pause", self.name, type(error).__name__, error,
            )  # fmt: skip
        self.failure = f"{type(error).__name__}: {error}"

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


def _describe(content: Row | LoggedGroups | Artefact | None) -> str:
    if isinstance(content, LoggedGroups):
        return f"{len(content.groups)} groups of {content.split}, step {content.step}"
    if isinstance(content, Artefact):
        return f"the artefact {content.name} of step {content.step}"
    return "nothing" if content is None else f"row {content.number} (step {content.step})"


class Reporting:
    """Feeds the sinks of one model from its log."""

    def __init__(self, paths: ModelPaths, run: Run, choices: Sequence[Choice], pauses: Pauses | None = None) -> None:
        pauses = pauses or Pauses()
        self._workers = [Worker(choice.make, choice.name, paths, run, pauses) for choice in choices]

    def start(self) -> None:
        """Start all sinks. It blocks until each is connected.

        Raises:
            Exception: the first error of a sink's `start`. Those that started are closed.
        """
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

    def takers_of_artefacts(self) -> list[str]:
        """Return the names of the trackers that take files."""
        return [worker.name for worker in self._workers if worker.takes_artefacts]

    def metrics(self) -> dict[str, float]:
        """Return what the trackers do not have, for the next row of the history. Nothing if all is well."""
        metrics: dict[str, float] = {}
        for worker in self._workers:
            waiting = worker.num_waiting()
            if waiting > MANY or (waiting and worker.failure is not None):
                metrics[f"sinks/{worker.name}_waiting_rows"] = waiting
            if worker.num_lost:
                metrics[f"sinks/{worker.name}_lost"] = worker.num_lost
        return metrics

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
            if worker.num_lost:
                logger.warning("%s lost %d rows, groups or artefacts in this run", worker.name, worker.num_lost)
        atexit.unregister(self.close)


def start_reporting(paths: ModelPaths, config: Mapping[str, Any], choices: Sequence[Choice]) -> Reporting:
    """Start the sinks of a model, and say in the log which and why.

    Args:
        config: what trackers are told about the run; `project` and `name` identify it.

    Raises:
        Exception: a sink cannot start.
    """
    project, name = config["project"], config["name"]
    paths.sinks.mkdir(parents=True, exist_ok=True)
    run = Run(project=project, name=name, folder=paths.sinks, config=plain_config(config))
    for choice in choices:
        logger.info("metrics of %s/%s go to %s, because %s", project, name, choice.name, choice.why)
    reporting = Reporting(paths, run, choices)
    reporting.start()
    return reporting
