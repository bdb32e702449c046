"""All sinks of one model: started together, asked for their state, closed."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from art.sinks.delivery.choose import Choice, plain_config
from art.sinks.delivery.worker import Pauses, Worker
from art.sinks.sink import Run
from art.storage.layout import ModelPaths

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Time to deliver what is left when a model is closed."""
CLOSE_FAILING_S = 5.0
"""Time for a tracker that failed already. What it does not get is sent by the next run."""
MANY = 20
"""Rows waiting for a slow tracker beyond which the log says so."""


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
            worker.start()
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
            worker.wake()

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
