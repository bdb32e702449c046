"""The record of rollouts: `Trajectory`, and `TrajectoryGroup` for the trajectories of one scenario.

A rollout appends messages and the model's choices to a trajectory and sets its reward. A group compares trajectories of
the same scenario; `TrajectoryGroup(rollout(s) for _ in range(8))` runs the rollouts when it is awaited. Both survive
`model_dump` / `model_dump_json` and back without loss, subclasses with fields of their own included.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
import re
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, Self, cast, overload

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, field_serializer, field_validator, model_validator
from pydantic_core import to_json

from art.errors import RolloutError, TrajectoryError
from art.messages import Messages, MessagesAndChoices, Tools, get_messages, is_choice, parse_item, to_message

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelType
else:
    _ModelType = type(BaseModel)

MetricValue = float | int | bool
MetadataValue = float | int | str | bool | None

_SPOILT = re.compile(r"(num_)?(invalid|malformed)_\w+|protocol_error")
"""Metrics of turns that break the rules or the format of a task."""


class RolloutObserver(Protocol):
    """Whoever gathers groups and wants to know how each rollout ends (`art.gather.GatherContext`)."""

    rollout_timeout_s: float | None
    """For each rollout of a group; `None` for no limit."""

    def rollout_finished(self, trajectory: Trajectory) -> None: ...

    def rollout_failed(self, error: Exception) -> None:
        """Count the failure, or raise `error` when it is one too many."""
        ...


rollout_observer: ContextVar[RolloutObserver | None] = ContextVar("rollout_observer", default=None)
"""Without an observer the first failed rollout of an awaited group raises."""


class _Record(BaseModel):
    # Python's json writes and reads NaN like this; a reward that is not a number must not turn into a missing one.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class History(_Record):
    """One conversation."""

    messages_and_choices: MessagesAndChoices = Field(default_factory=list)
    tools: Tools | None = None

    def messages(self) -> Messages:
        return get_messages(self.messages_and_choices)


class _TrajectoryType(_ModelType):
    """Lets `Trajectory(scenario=...)` keep what is no field as metadata; dumps are read as strictly as ever."""

    if not TYPE_CHECKING:

        def __call__(cls, **fields: Any) -> Any:
            if cls.model_config.get("extra") == "forbid" and (further := fields.keys() - cls.model_fields.keys()):
                metadata = {name: _as_metadata(fields.pop(name)) for name in sorted(further, key=list(fields).index)}
                fields["metadata"] = _joined(cls, dict(fields.get("metadata") or {}), metadata)
            return super().__call__(**fields)


_OTHER_WORDS = {
    "messages": "messages_and_choices", "choices": "messages_and_choices", "history": "additional_histories",
    "histories": "additional_histories",
}  # fmt: skip
"""What people write for a field."""


def _joined(cls: type[BaseModel], metadata: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        ValueError: a name is nearly that of a field, or is in `metadata` with another value.
    """
    for name, value in further.items():
        near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=0.8)
        if meant := _OTHER_WORDS.get(name) or (near[0] if near else None):
            raise ValueError(
                f"{cls.__name__} has no field {name!r}: write `{meant}`, or `metadata={{{name!r}: ...}}` for a value "
                "of that name to keep"
            )
        if metadata.setdefault(name, value) != value:
            raise ValueError(
                f"{name!r} is given twice: as {value!r}, and in `metadata` as {metadata[name]!r}; keep one"
            )
    return metadata


def _as_metadata(value: Any) -> MetadataValue:
    """`value` itself if it is a single number, text or `None`; anything else as JSON text."""
    value = to_plain(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return to_json(value, fallback=str).decode()


class Trajectory(History, metaclass=_TrajectoryType):
    """The record of one rollout.

    Keyword arguments that are no fields are kept in `metadata`: numbers, texts and `None` as they are, other things as
    JSON text. A name that is nearly that of a field is an error.

    Example: one turn, scored
        trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": "yes or no?"}])
        completion = await client.chat.completions.create(model=name, messages=trajectory.messages())
        trajectory.messages_and_choices.append(completion.choices[0])
        trajectory.reward = 1.0
    """

    additional_histories: list[History] = Field(default_factory=list)
    """Further conversations of the same rollout (sub-agents, a context that was compacted); they share its reward."""
    reward: float = 0.0
    turn_rewards: list[float] = Field(default_factory=list)
    """Further rewards, one per choice of `messages_and_choices`: each counts for its own choice and those before it."""
    token_rewards: list[list[float]] = Field(default_factory=list)
    """The same token by token: for each choice of `messages_and_choices`, one reward per sampled token, the one that
    ends the answer included, as `choice.logprobs.content` lists them."""
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    metadata: dict[str, MetadataValue] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    start_time: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @field_validator("reward", mode="before")
    @classmethod
    def _a_number(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("a reward is a number, got None; leave `reward` out until it is known")
        return value

    @field_validator("turn_rewards", "token_rewards", mode="before")
    @classmethod
    def _plain_lists(cls, value: Any) -> Any:
        return to_plain(value)

    @field_serializer("reward", "turn_rewards", "token_rewards", "metrics", "metadata")
    def _plain(self, value: Any) -> Any:
        """NumPy and torch scalars and arrays, which agents like to assign, as Python numbers and lists."""
        return to_plain(value)

    def log(self, message: str) -> None:
        self.logs.append(message)

    def finish(self) -> Self:
        """Set `metrics["duration"]` to the seconds since `start_time`."""
        self.metrics["duration"] = (datetime.now(UTC) - self.start_time.astimezone(UTC)).total_seconds()
        return self

    @asynccontextmanager
    async def track_duration(self, metric_name: str) -> AsyncIterator[None]:
        """Add the seconds spent inside to `metrics[f"{metric_name}_duration"]`."""
        key, start = f"{metric_name}_duration", time.monotonic()
        try:
            yield
        finally:
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - start

    def for_logging(self) -> dict[str, Any]:
        """The dump with `messages` in place of choices, each with `trainable` for whether the model sampled it."""
        shown = self.model_dump(mode="json", exclude={"messages_and_choices", "additional_histories"})
        shown = {key: value for key, value in shown.items() if value or key not in ("turn_rewards", "token_rewards")}
        shown["messages"] = [
            {**to_message(item), "trainable": is_choice(parse_item(item))} for item in self.messages_and_choices
        ]
        return shown

    def __str__(self) -> str:
        return f"{type(self).__name__}(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"


def to_plain(value: Any) -> Any:
    """`value` with NumPy and torch scalars and arrays, inside lists and dictionaries too, as Python's own."""
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def finite_number(value: Any) -> float | None:
    """A reward or metric as a float, numbers of NumPy and torch included; `None` if it is no finite number."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


class PydanticException(_Record):
    """An exception of a rollout, as it can be written to disk."""

    type: str
    message: str
    traceback: str

    @classmethod
    def from_exception(cls, error: BaseException) -> PydanticException:
        """Frames of asyncio and tqdm are left out: they are the same everywhere."""
        report = traceback.TracebackException.from_exception(error)
        part: traceback.TracebackException | None = report
        while part is not None:
            frames = [frame for frame in part.stack if not {"asyncio", "tqdm"} & set(PurePath(frame.filename).parts)]
            part.stack = traceback.StackSummary.from_list(frames)
            part = part.__cause__ or part.__context__
        return cls(type=type(error).__name__, message=str(error), traceback="".join(report.format()))


class _GroupType(type(BaseModel)):  # type: ignore[misc]
    """Makes `TrajectoryGroup(coroutines)` something to await, and everything else a group at once."""

    def __call__(cls, trajectories: Iterable[Any] = (), **fields: Any) -> Any:
        if isinstance(trajectories, (Awaitable, Trajectory)) or not isinstance(trajectories, Iterable):
            close_unstarted([trajectories])
            raise TrajectoryError(
                f"art.TrajectoryGroup takes the rollouts of one scenario, e.g. (rollout(model, scenario) for _ in "
                f"range(8)), or a list of trajectories; got one {type(trajectories).__name__}"
            )
        items = list(trajectories)
        if any(inspect.isawaitable(item) for item in items):
            return _PendingGroup(cls, items, fields)
        return super().__call__(items, **fields)


class TrajectoryGroup(_Record, metaclass=_GroupType):
    """Trajectories of one scenario, in the order of their rollouts, and the exceptions of those that failed."""

    trajectories: list[SerializeAsAny[Trajectory]] = Field(default_factory=list)
    exceptions: list[PydanticException] = Field(default_factory=list)
    metadata: dict[str, MetadataValue] = Field(default_factory=dict)
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)

    if TYPE_CHECKING:

        @overload
        def __new__(cls, trajectories: Iterable[Trajectory | BaseException] = (), **fields: Any) -> Self: ...

        @overload
        def __new__(  # type: ignore[misc]
            cls, trajectories: Iterable[Awaitable[Trajectory]], **fields: Any
        ) -> Coroutine[Any, Any, TrajectoryGroup]: ...

        def __new__(cls, trajectories: Any = (), **fields: Any) -> Any: ...

    def __init__(self, trajectories: Iterable[Any] = (), **fields: Any) -> None:
        """
        Args:
            trajectories: trajectories, exceptions of rollouts that failed, dumps of trajectories, or awaitables of
                trajectories; with any awaitable among them the call gives a coroutine instead of a group. What says of
                itself that it is an `infra_fault` (`metadata["outcome"]`) has no reward, and joins the exceptions.
            fields: `exceptions`, `metadata`, `metrics`, `logs`.
        """
        BaseModel.__init__(self, trajectories=trajectories, **fields)

    @model_validator(mode="before")
    @classmethod
    def _sort_items(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        items = [infra_fault(item) or item for item in data.get("trajectories", ())]
        failed = [*(data.get("exceptions") or ()), *(item for item in items if isinstance(item, BaseException))]
        given = {key: value for key, value in data.items() if value is not None}
        return given | {
            "trajectories": [_load_trajectory(item) for item in items if not isinstance(item, BaseException)],
            "exceptions": [
                PydanticException.from_exception(item) if isinstance(item, BaseException) else item for item in failed
            ],
        }

    def log(self, message: str) -> None:
        self.logs.append(message)

    def __copy__(self) -> Self:
        """A group with lists and dictionaries of its own, and the same trajectories in them."""
        copied = super().__copy__()
        for name, value in copied.__dict__.items():
            if isinstance(value, (list, dict)):
                copied.__dict__[name] = value.copy()
        return copied

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


def infra_fault(item: Any) -> RolloutError | None:
    """What to put in the place of a trajectory, or of its dump, that must not be scored; `None` for any other."""
    metadata = item.metadata if isinstance(item, Trajectory) else item.get("metadata") if isinstance(item, dict) else {}
    if not metadata or metadata.get("outcome") != "infra_fault":
        return None
    logs = item.logs if isinstance(item, Trajectory) else item.get("logs", [])
    return RolloutError(str(metadata.get("error") or (logs or ["a rollout ended as infra_fault"])[-1]))


def is_policy_fault(trajectory: Trajectory) -> bool:
    """Whether a rollout says that the policy has spoilt it, by its outcome or by a metric such as `invalid_move`."""
    return trajectory.metadata.get("outcome") == "policy_fault" or any(
        value > 0 and _SPOILT.fullmatch(name) for name, value in trajectory.metrics.items()
    )


def _load_trajectory(item: Any) -> Any:
    if not isinstance(item, Mapping):
        if not isinstance(item, Trajectory):
            raise ValueError(f"expected a Trajectory, got {type(item).__name__}; does the rollout return one?")
        return item
    return _class_with_fields(set(item)).model_validate(item)


def _class_with_fields(names: set[str]) -> type[Trajectory]:
    """The class whose dump has these keys: `Trajectory`, or else the subclass with the fewest further fields.

    Among equals the one defined last wins, so that a class that was defined again (in a notebook) replaces the old one.
    """
    known, queue = [Trajectory], [Trajectory]
    while queue:
        children = queue.pop().__subclasses__()
        known += children
        queue += children
    fitting = [cls for cls in reversed(known) if names <= cls.model_fields.keys()]
    return min(fitting, key=lambda cls: len(cls.model_fields), default=Trajectory)


class _PendingGroup(Coroutine[Any, Any, TrajectoryGroup]):
    """A group whose rollouts have not run: awaiting it runs them all at once."""

    def __init__(self, group_type: Any, items: list[Any], fields: dict[str, Any]) -> None:
        self._items = items
        self._num_trajectories = len(items)
        self._coroutine = _run_group(group_type, items, fields)

    def __await__(self) -> Generator[Any, Any, TrajectoryGroup]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._forget_if_unstarted()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._forget_if_unstarted()
        self._coroutine.close()

    def _forget_if_unstarted(self) -> None:
        if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED:
            close_unstarted(self._items)


async def _run_group(group_type: Any, items: list[Any], fields: dict[str, Any]) -> TrajectoryGroup:
    """Run all rollouts; failures become `exceptions`, unless the observer says that they are too many.

    Cancelling this, or an error that ends it, cancels the rollouts and waits until they are gone.
    """
    observer = rollout_observer.get()
    limit_s = None if observer is None else observer.rollout_timeout_s
    outcomes = [asyncio.ensure_future(within(item, limit_s)) if inspect.isawaitable(item) else item for item in items]
    tasks = [outcome for outcome in outcomes if isinstance(outcome, asyncio.Future)]
    try:
        for finished in asyncio.as_completed(tasks):
            try:
                trajectory = await finished
            except Exception as error:
                if observer is None:
                    raise
                observer.rollout_failed(error)
            else:
                if not isinstance(trajectory, (Trajectory, Mapping)):
                    what = "None" if trajectory is None else f"a {type(trajectory).__name__}"
                    raise TrajectoryError(f"a rollout of a group returned {what}; it must return an art.Trajectory")
                if observer is not None and (fault := infra_fault(trajectory)) is not None:
                    observer.rollout_failed(fault)
                elif observer is not None and isinstance(trajectory, Trajectory):
                    observer.rollout_finished(trajectory)
    except BaseException:
        await cancel_and_wait(tasks)
        close_unstarted(items)  # within a time limit that was cancelled before it began
        raise
    return cast(TrajectoryGroup, group_type([_outcome(item) for item in outcomes], **fields))


def within(rollout: Awaitable[Any], limit_s: float | None) -> Awaitable[Any]:
    """A rollout with a time limit.

    Raises (when it is awaited):
        TimeoutError: it was cancelled then.
    """
    return rollout if limit_s is None else _within(rollout, limit_s)


async def _within(rollout: Awaitable[Any], limit_s: float) -> Any:
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await rollout
    except TimeoutError as error:
        if not limit.expired():
            raise  # its own
        raise TimeoutError(f"a rollout took longer than {limit_s:g} s") from error


def _outcome(item: Any) -> Any:
    if not isinstance(item, asyncio.Future):
        return item
    error = item.exception()
    return item.result() if error is None else error


def close_unstarted(awaitables: Iterable[Any]) -> None:
    """Tell coroutines that nobody will await them, so that Python does not warn about each of them."""
    for item in awaitables:
        if isinstance(item, Coroutine):
            item.close()


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait for its end; results and errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
