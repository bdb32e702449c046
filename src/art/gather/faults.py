"""How rollouts end, counted; and how many may fail before a run ends.

    outcome          is                                               reward
    ok               the rollout returned a trajectory                its own
    policy_fault     the same, with `metadata["outcome"]` saying so   its own: the policy has spoilt it, and learns so
    infra_fault      it raised, was too late, or says so itself       none: it is left out and counted, never scored 0

    faults = art.FaultWatch(max_rate=0.5)
    groups = await art.gather_trajectory_groups(pending, faults=faults)
    await model.log(groups, split="train", metrics=result.metrics | faults.metrics())

What fails because of a machine fails for a while or for ever. The first must not end a run and the second must, so the
share is taken over the last rollouts, however many steps they are of.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from art.errors import (
    AuthenticationError,
    BudgetError,
    ConfigError,
    FaultRateError,
    JudgeError,
    PermissionDeniedError,
    ProcessError,
    ToolServerError,
)
from art.trajectory import PydanticException, Trajectory, TrajectoryGroup

FATAL = (BudgetError, ConfigError, FaultRateError, AuthenticationError, PermissionDeniedError)
"""No later rollout would fare better: these end a gather at once."""
_MAX_SHOWN = 200
"""Characters of an error in the message of another."""


class FaultWatch:
    """Counts how rollouts end, gather after gather. Give it to `gather_trajectory_groups` and the like as `faults=`."""

    def __init__(
        self, max_rate: float = 0.5, *, window: int = 64, name: str = "infra_fault", what: str = "rollouts"
    ) -> None:
        """
        Args:
            max_rate: share of the last `window` that may fail. A single failure says nothing about a rate, so the
                window must be full before more is an error.
            name: of the metrics: `data/<name>_rate`.
            what: is counted, for messages.
        """
        if not 0 <= max_rate <= 1 or window < 1:
            raise ConfigError(f"expected 0 <= max_rate <= 1 and window >= 1, got {max_rate} and {window}")
        self.max_rate, self._name, self._what = max_rate, name, what
        self._recent: deque[bool] = deque(maxlen=window)
        """Whether each of the last ones failed."""
        self.num_faults = 0
        """Since the beginning."""
        self._last: BaseException | PydanticException | None = None
        self._ended: Counter[str] = Counter()
        """Since `metrics` was last asked: `all`, `policy_fault`."""
        self._kinds: Counter[str] = Counter()
        """Faults since then, by kind."""

    def count(self, trajectory: Trajectory) -> None:
        """A rollout that gave a trajectory."""
        self._ended["policy_fault"] += trajectory.metadata.get("outcome") == "policy_fault"
        self.succeeded()

    def succeeded(self) -> None:
        self._ended["all"] += 1
        self._recent.append(False)

    def failed(self, error: BaseException | PydanticException) -> None:
        """
        Raises:
            FaultRateError: one too many of late.
        """
        self._ended["all"] += 1
        self._recent.append(True)
        self._fault(error)

    def lost(self, error: BaseException) -> None:
        """A rollout that was counted already turns out to be of no use: nothing could score it.

        Raises:
            FaultRateError: one too many of late.
        """
        if False in self._recent:
            self._recent.remove(False)
            self._recent.append(True)
        self._fault(error)

    def count_groups(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Rollouts that ran elsewhere, as `collect_trajectory_groups` hands them out.

        Raises:
            FaultRateError: too many failed of late.
        """
        for group in groups:
            for trajectory in group:
                self.count(trajectory)
            for error in group.exceptions:
                self.failed(error)

    def _fault(self, error: BaseException | PydanticException) -> None:
        self.num_faults += 1
        self._kinds[kind_of(error)] += 1
        self._last = error
        num_failed, window = sum(self._recent), self._recent.maxlen or 0
        if len(self._recent) == window and num_failed > self.max_rate * window:
            kinds = ", ".join(f"{kind} {count}" for kind, count in self._kinds.most_common())
            raise FaultRateError(
                f"{num_failed} of the last {window} {self._what} failed, and not by the policy's fault (allowed is a "
                f"share of {self.max_rate:g}): {kinds}. None of them was scored. The last error: {_describe(error)}"
            ) from (error if isinstance(error, BaseException) else None)

    def metrics(self) -> dict[str, float]:
        """Of what ended since this was last asked: the rate of faults, how many by kind, and where it is known the
        rate of the policy's own faults."""
        ended, kinds = self._ended, self._kinds
        self._ended, self._kinds = Counter(), Counter()
        if not ended["all"]:
            return {}
        rates = {f"data/{self._name}_rate": kinds.total() / ended["all"]}
        if ended["policy_fault"]:
            rates["data/policy_fault_rate"] = ended["policy_fault"] / ended["all"]
        return rates | {f"data/{self._name}s/{kind}": float(count) for kind, count in kinds.items()}


def kind_of(error: BaseException | PydanticException) -> str:
    """What failed, in a word.

    Example: an error with the HTTP status 429 is `rate_limit`, a `TimeoutError` is `timeout`, a `ZeroDivisionError` is
    itself.
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
    return f"{name}: {' '.join(text.split())[:_MAX_SHOWN]}"
