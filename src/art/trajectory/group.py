"""`TrajectoryGroup`: the trajectories of one scenario, which training compares with each other."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, overload

from pydantic import BaseModel, Field, SerializeAsAny, model_validator

from art.errors import TrajectoryError
from art.trajectory.pending import PendingGroup, close_unstarted
from art.trajectory.record import MetadataValue, MetricValue, PydanticException, Record, Trajectory, infra_fault


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
    if not isinstance(item, Mapping):
        if not isinstance(item, Trajectory):
            raise ValueError(f"expected a Trajectory, got {type(item).__name__}; does the rollout return one?")
        return item
    return _class_with_fields(set(item)).model_validate(item)


def _class_with_fields(names: set[str]) -> type[Trajectory]:
    """The class whose dump has these keys: `Trajectory`, or else the subclass with the fewest further fields.

    Among equals the class defined last wins: a notebook cell that defines a class again replaces the older one.
    """
    known, queue = [Trajectory], [Trajectory]
    while queue:
        children = queue.pop().__subclasses__()
        known += children
        queue += children
    fitting = [cls for cls in reversed(known) if names <= cls.model_fields.keys()]
    return min(fitting, key=lambda cls: len(cls.model_fields), default=Trajectory)
