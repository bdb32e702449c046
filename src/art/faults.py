"""Counts how rollouts end, and ends a run in which too many of them fail.

    outcome          what happened                                          reward
    ok               the rollout returned a trajectory                      its own
    policy_fault     it returned one whose `metadata["outcome"]` says so    its own: the policy caused it and learns it
    infra_fault      it raised, was too late, or its outcome says so        none: it is dropped and counted, never 0

    faults = art.FaultWatch(max_rate=0.5)
    groups = await art.gather_trajectory_groups(pending, faults=faults)
    await model.log(groups, split="train", metrics=result.metrics | faults.metrics())

A machine may fail for a while, which must not end a run, or for ever, which must. So the share of failures is taken
over the most recent rollouts, however many steps they belong to.
"""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path

from art.errors import (
    AuthenticationError,
    BudgetError,
    ConfigError,
    DiskFullError,
    FaultRateError,
    JudgeError,
    PermissionDeniedError,
    ProcessError,
    ToolServerError,
)
from art.trajectory import PydanticException, RemoteTraceback, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

FATAL = (BudgetError, ConfigError, DiskFullError, FaultRateError, AuthenticationError, PermissionDeniedError)
"""Errors that end a gather at once, because every later rollout would fail too."""
POLICY_FAULT_RATE = "data/policy_fault_rate"
_DISK_FULL = 507
"""HTTP status of a server that cannot record answers, as clients of any library report it in `status_code`."""
_MAX_SHOWN = 200
"""Characters of the last error that a message quotes."""
_INSTALLED = tuple({*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1])})
"""Folders of Python, of installed packages and of ART."""


def is_own(filename: str) -> bool:
    """Whether a file of Python code belongs to the user's program."""
    return not filename.startswith((*_INSTALLED, "<"))


def stack_of(error: BaseException) -> traceback.StackSummary:
    """Return the frames of an error's traceback, those of another process if it was raised there."""
    cause = error.__cause__
    return cause.stack if isinstance(cause, RemoteTraceback) else traceback.extract_tb(error.__traceback__)


def place_of(error: BaseException) -> str:
    """Return the last line of the user's program in an error's traceback, or else its last line."""
    frames = stack_of(error)
    place = next((frame for frame in reversed(frames) if is_own(frame.filename)), frames[-1] if frames else None)
    return "" if place is None else f"{place.filename}:{place.lineno} in {place.name}"


class FailureLog:
    """Logs the first failure of each kind and place with its traceback, and counts those like it."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, error: Exception) -> None:
        kind, place = type(error).__name__, place_of(error)
        self._counts[kind, place] += 1
        count = self._counts[kind, place]
        if count == 1:
            report = traceback.TracebackException.from_exception(error)
            stack = stack_of(error)
            shown = [frame for frame in stack[:-1] if is_own(frame.filename)] + stack[-1:]
            report.stack = traceback.StackSummary.from_list(shown)
            text = "".join(report.format(chain=False)).rstrip()
            logger.warning("a rollout failed; its group goes on without it. Others like it are counted:\n%s", text)
        elif count in (10, 100, 1000, 10_000):
            logger.warning("%d rollouts have failed like this: %s", count, _describe(error))


class FaultWatch:
    """Counts how rollouts end, over several gathers. Pass it to the gather functions as `faults=`."""

    def __init__(
        self, max_rate: float = 0.5, *, window: int = 64, name: str = "infra_fault", what: str = "rollouts"
    ) -> None:
        """
        Args:
            max_rate: share of the last `window` rollouts that may fail.
            window: number of recent rollouts. Until the window is full no share is an error, because a single failure
                says nothing about a rate.
            name: part of the metrics' names: `data/<name>_rate`.
            what: name of what is counted, for messages.
        """
        if not 0 <= max_rate <= 1 or window < 1:
            raise ConfigError(f"expected 0 <= max_rate <= 1 and window >= 1, got {max_rate} and {window}")
        self.max_rate, self._name, self._what = max_rate, name, what
        self._recent: deque[bool] = deque(maxlen=window)
        """Whether each of the most recent rollouts failed."""
        self.num_faults = 0
        """Failures since this watch was made."""
        self._ended: Counter[str] = Counter()
        """Rollouts since the last call of `metrics`: `all`, `policy_fault`."""
        self._kinds: Counter[str] = Counter()
        """Failures since the last call of `metrics`, by kind."""
        self.failures = FailureLog()

    def count(self, trajectory: Trajectory) -> None:
        """Count a rollout that returned a trajectory."""
        self._ended["policy_fault"] += trajectory.metadata.get("outcome") == "policy_fault"
        self.succeeded()

    def succeeded(self) -> None:
        self._ended["all"] += 1
        self._recent.append(False)

    def failed(self, error: BaseException | PydanticException) -> None:
        """Count a failed rollout.

        Raises:
            FaultRateError: too many of the recent rollouts failed.
        """
        self._ended["all"] += 1
        self._recent.append(True)
        self._fault(error)

    def lost(self, error: BaseException) -> None:
        """Count a rollout as failed that `count` took for a success, because nothing could score it.

        Raises:
            FaultRateError: too many of the recent rollouts failed.
        """
        if False in self._recent:
            self._recent.remove(False)
            self._recent.append(True)
        self._fault(error)

    def group_lost(self, group: TrajectoryGroup, error: BaseException) -> None:
        """Count all rollouts of a group as failed, because nothing could score the group."""
        for _ in group:
            self.lost(error)

    def count_groups(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Count rollouts that ran elsewhere, such as those from `collect_trajectory_groups`.

        Raises:
            FaultRateError: too many of the recent rollouts failed.
        """
        for group in groups:
            for trajectory in group:
                self.count(trajectory)
            for error in group.exceptions:
                self.failed(error)

    def _fault(self, error: BaseException | PydanticException) -> None:
        self.num_faults += 1
        self._kinds[kind_of(error)] += 1
        num_failed, window = sum(self._recent), self._recent.maxlen or 0
        if len(self._recent) == window and num_failed > self.max_rate * window:
            kinds = ", ".join(f"{kind} {count}" for kind, count in self._kinds.most_common())
            raise FaultRateError(
                f"{num_failed} of the last {window} {self._what} failed, and not by the policy's fault (allowed is a "
                f"share of {self.max_rate:g}): {kinds}. None of them was scored. The last error: {_describe(error)}"
            ) from (error if isinstance(error, BaseException) else None)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the rollouts since the last call: rate of faults, number by kind, rate of policy faults."""
        ended, kinds = self._ended, self._kinds
        self._ended, self._kinds = Counter(), Counter()
        if not ended["all"]:
            return {}
        rates = {f"data/{self._name}_rate": kinds.total() / ended["all"]}
        if ended["policy_fault"]:
            rates[POLICY_FAULT_RATE] = ended["policy_fault"] / ended["all"]
        return rates | {f"data/{self._name}s/{kind}": float(count) for kind, count in kinds.items()}


def raise_if_fatal(error: Exception) -> None:
    """Raise the error of a rollout if every later rollout would fail too.

    Raises:
        DiskFullError: the server's disk is full. Groups would be trained without the rollouts that fail meanwhile.
        Exception: `error` itself, if it is one of `FATAL`.
    """
    if isinstance(error, FATAL):
        raise error
    if getattr(error, "status_code", None) == _DISK_FULL:
        raise DiskFullError(
            f"the run stops, because a rollout could not be recorded: {_describe(error)}. Free space there, then start "
            "the script again; a pipeline goes on with the rollouts that have ended"
        ) from error


def kind_of(error: BaseException | PydanticException) -> str:
    """Name in one word what failed.

    Example: an error with the HTTP status 429 gives `rate_limit`, a `TimeoutError` gives `timeout`, and an error of no
    known kind gives the name of its class.
    """
    name = error.type if isinstance(error, PydanticException) else type(error).__name__
    status = getattr(error, "status_code", None)
    if status == 429 or name == "RateLimitError":
        return "rate_limit"
    if isinstance(error, TimeoutError) or "timeout" in name.lower():
        return "timeout"
    if isinstance(error, JudgeError):
        return "judge"
    if isinstance(error, ToolServerError):
        return "tool_server"
    if isinstance(error, (ConnectionError, ProcessError)) or "connection" in name.lower() or (status or 0) >= 500:
        return "server"
    return name


def _describe(error: BaseException | PydanticException) -> str:
    name, text = (
        (error.type, error.message) if isinstance(error, PydanticException) else (type(error).__name__, str(error))
    )
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    place = place_of(error) if isinstance(error, BaseException) else ""
    return f"{name}: {' '.join(text.split())[:_MAX_SHOWN]}{notes}{place and f' ({place})'}"
