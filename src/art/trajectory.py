"""The record of rollouts: `Trajectory`, and `TrajectoryGroup` for the trajectories of one scenario.

A rollout appends messages and the model's choices to a trajectory and sets its reward. Dumping it with `model_dump` or
`model_dump_json` and loading it again loses nothing, in subclasses with fields of their own too.
`TrajectoryGroup(rollouts)` with rollouts that have not run is a coroutine that runs them and returns the group.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SerializeAsAny, field_serializer
from pydantic.functional_validators import field_validator, model_validator
from pydantic_core import to_json

from art.errors import RolloutError, TrajectoryError
from art.messages import Messages, MessagesAndChoices, Tools, get_messages, is_choice, parse_item, to_message

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelType
else:
    _ModelType = type(BaseModel)

MetricValue = float | int | bool
MetadataValue = float | int | str | bool | None
G = TypeVar("G")
_SPOILT = re.compile(r"(num_)?(invalid|malformed)_\w+|protocol_error")
"""Names of metrics that count turns which broke the rules or the format of a task."""


class Record(BaseModel):
    """Base class of the records in trajectory files. A field name that the class does not know is an error."""

    # Python's json writes and reads NaN like this; a reward that is not a number must not turn into a missing one.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class History(Record):
    """One conversation of a rollout: the messages, the answers of the model, and the tools that it was offered."""

    messages_and_choices: MessagesAndChoices = Field(default_factory=list)
    """Messages in OpenAI's format, and the `Choice` objects that the model answered with. Choices are trained."""
    tools: Tools | None = None
    """Tools that the model was offered, in OpenAI's format."""

    def messages(self) -> Messages:
        """Return the conversation as plain messages, to send to a model."""
        return get_messages(self.messages_and_choices)


_open_capture: Callable[[Trajectory], AbstractContextManager[None]] | None = None


def capture_with(open_capture: Callable[[Trajectory], AbstractContextManager[None]]) -> None:
    """Set what `with Trajectory()` opens. `art.capture`, which lies above this room, calls this when it is imported."""
    global _open_capture
    _open_capture = open_capture


_OTHER_WORDS = {
    "messages": "messages_and_choices", "choices": "messages_and_choices", "history": "additional_histories",
    "histories": "additional_histories",
}  # fmt: skip
"""Names that people often write instead of a field's own."""


class _TrajectoryType(_ModelType):
    """Makes `Trajectory(scenario=...)` keep unknown keywords as metadata. Loading a dump still refuses them."""

    if not TYPE_CHECKING:

        def __call__(cls, **fields: Any) -> Any:
            """
            Raises:
                ValueError: a keyword is nearly the name of a field, or is in `metadata` with another value.
            """
            further = [] if cls.model_config.get("extra") != "forbid" else fields.keys() - cls.model_fields.keys()
            if further:
                import difflib  # not needed by programs that pass fields only

                metadata = dict(fields.get("metadata") or {})
                for name in sorted(further, key=list(fields).index):
                    near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=0.8)
                    if meant := _OTHER_WORDS.get(name) or (near[0] if near else None):
                        raise ValueError(
                            f"{cls.__name__} has no field {name!r}: write `{meant}`, or `metadata={{{name!r}: ...}}` "
                            "for a value of that name to keep"
                        )
                    value = to_plain(fields.pop(name))
                    if not (value is None or isinstance(value, (bool, int, float, str))):
                        value = to_json(value, fallback=str).decode()
                    if metadata.setdefault(name, value) != value:
                        raise ValueError(
                            f"{name!r} is given twice: as {value!r}, and in `metadata` as {metadata[name]!r}; keep one"
                        )
                fields["metadata"] = metadata
            return super().__call__(**fields)


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
    """How good the rollout was. Only differences within a group count."""
    turn_rewards: list[float] = Field(default_factory=list)
    """Further rewards, one per choice of `messages_and_choices`: each counts for its own choice and those before it."""
    token_rewards: list[list[float]] = Field(default_factory=list)
    """Further rewards per token: for each choice of `messages_and_choices` one number per sampled token, in the order
    of `choice.logprobs.content`, which includes the token that ends the answer."""
    initial_policy_version: int | None = None
    """The model's step when the first answer was sampled; `None` if unknown."""
    final_policy_version: int | None = None
    """The model's step when the last answer was sampled; `None` if unknown."""
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    """Numbers about the rollout; `model.log` writes their means."""
    metadata: dict[str, MetadataValue] = Field(default_factory=dict)
    """Anything to keep with the rollout. `outcome` says how it ended: `ok`, `policy_fault` or `infra_fault`."""
    logs: list[str] = Field(default_factory=list)
    """Lines added by `log`."""
    start_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    """Time at which the trajectory was made, with its time zone."""
    _scope: AbstractContextManager[None] | None = PrivateAttr(default=None)

    def __enter__(self) -> Self:
        """Capture the chat completions that code inside the block asks for, with any client that is built on httpx.

            with art.Trajectory() as trajectory:
                await agent(client, scenario)
            trajectory.reward = 1.0

        Raises:
            RuntimeError: the trajectory is already open.
        """
        if self._scope is not None:
            raise RuntimeError("this trajectory is already open: make another one for another block")
        assert _open_capture is not None  # `import art` has set it
        self._scope = _open_capture(self)
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        scope, self._scope = self._scope, None
        assert scope is not None
        scope.__exit__(*error)

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
        return to_plain(value)

    def log(self, message: str) -> None:
        """Add a line to `logs`."""
        self.logs.append(message)

    def finish(self) -> Self:
        """Set `metrics["duration"]` to the seconds since `start_time`, and return the trajectory itself."""
        self.metrics["duration"] = (datetime.now(UTC) - self.start_time.astimezone(UTC)).total_seconds()
        return self

    @asynccontextmanager
    async def track_duration(self, metric_name: str) -> AsyncIterator[None]:
        """Context manager: add the seconds spent inside to `metrics[f"{metric_name}_duration"]`."""
        key, start = f"{metric_name}_duration", time.monotonic()
        try:
            yield
        finally:
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - start

    def for_logging(self) -> dict[str, Any]:
        """Dump the trajectory with plain `messages`; `trainable` in each says whether the model sampled it."""
        shown = self.model_dump(mode="json", exclude={"messages_and_choices", "additional_histories"})
        shown = {key: value for key, value in shown.items() if value or key not in ("turn_rewards", "token_rewards")}
        shown["messages"] = [
            {**to_message(item), "trainable": is_choice(parse_item(item))} for item in self.messages_and_choices
        ]
        return shown

    def __str__(self) -> str:
        return f"{type(self).__name__}(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"


class PydanticException(Record):
    """An exception of a rollout, in a form that can be written to disk."""

    type: str
    """Name of the exception's class."""
    message: str
    """Text of the exception."""
    traceback: str
    """Traceback as Python prints it, without frames of asyncio and tqdm."""

    @classmethod
    def from_exception(cls, error: BaseException) -> PydanticException:
        """Make the record of `error`, without the frames of asyncio and tqdm in its traceback."""
        report = traceback.TracebackException.from_exception(error)
        part: traceback.TracebackException | None = report
        while part is not None:
            frames = [frame for frame in part.stack if not {"asyncio", "tqdm"} & set(PurePath(frame.filename).parts)]
            part.stack = traceback.StackSummary.from_list(frames)
            part = part.__cause__ or part.__context__
        return cls(type=type(error).__name__, message=str(error), traceback="".join(report.format()))


class RemoteTraceback(Exception):
    """The traceback of an error that was raised in another process. Here it is the `__cause__` of the error."""

    def __init__(self, text: str, stack: traceback.StackSummary) -> None:
        super().__init__(text, stack)
        self.text, self.stack = text, stack

    def __str__(self) -> str:
        return f"\n{self.text}"


def infra_fault(item: Any) -> RolloutError | None:
    """Return an error for a trajectory, or a dump of one, whose `metadata["outcome"]` is `infra_fault`; else `None`.

    The outcome says that the policy is not to blame. The error then replaces the trajectory, which is not scored.
    """
    metadata = item.metadata if isinstance(item, Trajectory) else item.get("metadata") if isinstance(item, dict) else {}
    if not metadata or metadata.get("outcome") != "infra_fault":
        return None
    logs = item.logs if isinstance(item, Trajectory) else item.get("logs", [])
    return RolloutError(str(metadata.get("error") or (logs or ["a rollout ended as infra_fault"])[-1]))


def is_policy_fault(trajectory: Trajectory) -> bool:
    """Whether the policy spoilt the rollout: its outcome says so, or a metric such as `invalid_move` is above 0."""
    return says_policy_fault(trajectory.metadata, trajectory.metrics)


def says_policy_fault(metadata: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
    """Whether the metadata and metrics of a trajectory say that the policy spoilt the rollout."""
    return metadata.get("outcome") == "policy_fault" or any(
        value > 0 and _SPOILT.fullmatch(name) for name, value in metrics.items()
    )


def to_plain(value: Any) -> Any:
    """Replace NumPy and torch scalars and arrays by Python values, inside lists and dictionaries too."""
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def finite_number(value: Any) -> float | None:
    """Convert a reward or metric to a float; `None` if it is not a finite number."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


class RolloutObserver(Protocol):
    """Interface of an object that is told how each rollout of an awaited group ends, such as `GatherContext`."""

    rollout_timeout_s: float | None
    """Time limit of each rollout; `None` for no limit."""

    def rollout_finished(self, trajectory: Trajectory) -> None: ...

    def rollout_failed(self, error: Exception) -> None:
        """Count the failure. Raise `error` to stop when there are too many failures."""
        ...


rollout_observer: ContextVar[RolloutObserver | None] = ContextVar("rollout_observer", default=None)
"""Observer of the rollouts that this task starts. Without one, the first failed rollout of a group raises its error."""


class PendingGroup(Coroutine[Any, Any, G]):
    """A coroutine that runs all rollouts of a group at once and returns the finished group."""

    def __init__(self, make_group: Callable[[list[Any]], G], items: list[Any]) -> None:
        """
        Args:
            make_group: makes the group from trajectories and exceptions, when every rollout has ended.
            items: rollouts to await; anything else is passed to `make_group` unchanged.
        """
        self._items = items
        self.num_trajectories = len(items)
        self._coroutine = _run_group(make_group, items)

    @property
    def rollouts(self) -> list[Any]:
        """What the group was made of. Replace items before the group is awaited to run them in another way."""
        return self._items

    def num_unfinished(self) -> int:
        """Number of rollouts that have not ended."""
        return sum(inspect.isawaitable(item) and not has_ended(item) for item in self._items)

    def __await__(self) -> Generator[Any, Any, G]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._close_items_if_unstarted()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._close_items_if_unstarted()
        self._coroutine.close()

    def _close_items_if_unstarted(self) -> None:
        if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED:
            close_unstarted(self._items)


async def _run_group(make_group: Callable[[list[Any]], G], items: list[Any]) -> G:
    """Run all rollouts. Failures become exceptions of the group, unless the observer raises.

    Cancelling this, or an error that ends it, cancels the rollouts and waits until they have ended.
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
                continue
            if not isinstance(trajectory, (Trajectory, Mapping)):
                what = "None" if trajectory is None else f"a {type(trajectory).__name__}"
                raise TrajectoryError(f"a rollout of a group returned {what}; it must return an art.Trajectory")
            if observer is not None and (fault := infra_fault(trajectory)) is not None:
                observer.rollout_failed(fault)
            elif observer is not None and isinstance(trajectory, Trajectory):
                observer.rollout_finished(trajectory)
    except BaseException:
        await cancel_and_wait(tasks)
        close_unstarted(items)  # a rollout may have been cancelled before it began
        raise
    return make_group(
        [item.exception() or item.result() if isinstance(item, asyncio.Future) else item for item in outcomes]
    )


@dataclass(slots=True)
class TimeLimit:
    """The time limit of one rollout, which a pool of workers stops while the rollout waits for a worker."""

    timeout: asyncio.Timeout
    limit_s: float
    is_in_worker: bool = False
    """Whether the whole rollout runs in a worker. A rollout that runs here may ask workers too, on its own time."""


time_limit: ContextVar[TimeLimit | None] = ContextVar("rollout_time_limit", default=None)


async def within(rollout: Awaitable[Any], limit_s: float | None) -> Any:
    """Await a rollout for at most `limit_s` seconds; `None` is no limit.

    Raises:
        TimeoutError: it took longer.
    """
    try:
        async with asyncio.timeout(limit_s) as timeout:
            token = time_limit.set(None if limit_s is None else TimeLimit(timeout, limit_s))
            try:
                return await rollout
            finally:
                time_limit.reset(token)
    except TimeoutError as error:
        if not timeout.expired():
            raise  # the rollout raised it
        raise TimeoutError(f"a rollout took longer than {limit_s:g} s") from error


@contextmanager
def without_time_limit() -> Iterator[None]:
    """Context manager for the wait for a worker: the time limit of the rollout begins when the body ends."""
    limit = time_limit.get()
    if limit is None or not limit.is_in_worker:
        yield
        return
    limit.timeout.reschedule(None)
    yield
    limit.timeout.reschedule(asyncio.get_running_loop().time() + limit.limit_s)


def has_ended(rollout: Awaitable[Any]) -> bool:
    """Whether a coroutine or task has ended. Of another awaitable nobody can tell, so it counts as running."""
    if inspect.iscoroutine(rollout):
        return inspect.getcoroutinestate(rollout) == inspect.CORO_CLOSED
    return isinstance(rollout, asyncio.Future) and rollout.done()


def close_unstarted(awaitables: Iterable[Any]) -> None:
    """Close coroutines that will never be awaited, so that Python does not warn about each of them."""
    for item in awaitables:
        if isinstance(item, Coroutine):
            item.close()


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks that still run and wait until they have ended; their results and errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
            return PendingGroup(lambda ended: cls(ended, **fields), items)
        return super().__call__(items, **fields)


class TrajectoryGroup(Record, metaclass=_GroupType):
    """Trajectories of one scenario, in the order of their rollouts, and the exceptions of those that failed."""

    trajectories: list[SerializeAsAny[Trajectory]] = Field(default_factory=list)
    """Rollouts that returned a trajectory."""
    exceptions: list[PydanticException] = Field(default_factory=list)
    """Exceptions of rollouts that failed; these rollouts have no reward and are not trained."""
    metadata: dict[str, MetadataValue] = Field(default_factory=dict)
    """Anything to keep with the group, such as the id of its scenario."""
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    """Numbers about the group as a whole; `model.log` writes their means."""
    logs: list[str] = Field(default_factory=list)
    """Lines added by `log`."""

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
                trajectories. With any awaitable among them the call returns a coroutine instead of a group. A
                trajectory with `metadata["outcome"] == "infra_fault"` has no reward, and joins the exceptions.
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
        return {key: value for key, value in data.items() if value is not None} | {
            "trajectories": [_load_trajectory(item) for item in items if not isinstance(item, BaseException)],
            "exceptions": [
                PydanticException.from_exception(item) if isinstance(item, BaseException) else item for item in failed
            ],
        }

    def log(self, message: str) -> None:
        """Add a line to `logs`."""
        self.logs.append(message)

    def __copy__(self) -> Self:
        """Copy the lists and dictionaries; the trajectories in them stay the same objects."""
        copied = super().__copy__()
        for name, value in copied.__dict__.items():
            if isinstance(value, (list, dict)):
                copied.__dict__[name] = value.copy()
        return copied

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


def _load_trajectory(item: Any) -> Any:
    """Load a dump of a trajectory, in the class whose dump has its keys. A trajectory stays as it is.

    That is `Trajectory`, or else the subclass with the fewest further fields. Among equals the class defined last wins:
    a notebook cell that defines a class again replaces the older one.
    """
    if isinstance(item, Trajectory):
        return item
    if not isinstance(item, Mapping):
        raise ValueError(f"expected a Trajectory, got {type(item).__name__}; does the rollout return one?")
    known, queue = [Trajectory], [Trajectory]
    while queue:
        children = queue.pop().__subclasses__()
        known += children
        queue += children
    fitting = [cls for cls in reversed(known) if item.keys() <= cls.model_fields.keys()]
    return min(fitting, key=lambda cls: len(cls.model_fields), default=Trajectory).model_validate(item)
