"""Admission of groups for loops of one's own: `Pipeline.group`, `next_groups` and `published`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from art.asynchronous.pace import Pace
from art.asynchronous.plan import group_seed
from art.asynchronous.running import check_engine
from art.client.arguments import describe
from art.client.rollout_context import RolloutContext, inside_rollout
from art.config import PipelineConfig
from art.errors import ConfigError, TrajectoryError
from art.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from art.model import TrainableModel


@dataclass(slots=True, kw_only=True)
class GroupSlot:
    """The permission to run one group."""

    number: int
    """Number of the group in the order of starting, from 0."""
    policy_version: int
    """Step of the checkpoint that answers requests inside the body, unless in_flight="switch"."""
    seed: int
    """Seed of the group, for randomness of your own."""
    scenario: Any = None
    group: TrajectoryGroup | None = field(default=None, init=False)
    """What was passed to `finish`."""

    def finish(self, group: TrajectoryGroup) -> None:
        """Hand over the finished group, to be trained by a later step.

        Raises:
            TrajectoryError: it is something else than a group.
        """
        if not isinstance(group, TrajectoryGroup):
            raise TrajectoryError(f"`finish` takes a finished TrajectoryGroup, got {describe(group)}")
        self.group = group


class Slots:
    """Lets groups start as the pace allows, for a loop of one's own."""

    def __init__(self, model: TrainableModel[Any, Any], config: PipelineConfig) -> None:
        self._model, self._config = model, config
        self._pace: Pace | None = None
        self._groups: dict[int, TrajectoryGroup] = {}
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def group(self, scenario: Any) -> AsyncGenerator[GroupSlot]:
        """Wait until a group may start, and run it in the body."""
        pace = await self._get_pace()
        await self._until(pace.may_start)
        slot = GroupSlot(
            number=pace.start(), policy_version=pace.version, scenario=scenario,
            seed=group_seed(self._config.seed, pace.next_number - 1),
        )  # fmt: skip
        step = slot.policy_version if self._config.in_flight == "finish" else None
        name = f"{self._model.project}/{self._model.name}"
        context = RolloutContext(model=name, step=step, seed=slot.seed, switches=step is None)
        try:
            with inside_rollout(context):
                yield slot
        finally:
            self._end(pace, slot)

    async def next_groups(self) -> list[TrajectoryGroup]:
        """Wait for the groups of the next step, and begin it."""
        pace = await self._get_pace()
        if pace.is_training:
            raise ConfigError("call `published` with the step of the last training before you ask for further groups")
        await self._until(lambda: pace.next_step() is not None)
        numbers = pace.next_step() or []
        pace.begin(numbers)
        return [self._groups.pop(number) for number in numbers]

    def published(self, step: int) -> None:
        """Note the step that the training of these groups has led to."""
        if self._pace is None:
            raise ConfigError("`published` comes after `next_groups` and the training of what it returned")
        if step == self._pace.version and self._pace.is_training:
            self._pace.skip()
        else:
            self._pace.publish(step)
        self._changed.set()

    async def _get_pace(self) -> Pace:
        if self._pace is None:
            config, version = self._config, await check_engine(self._model, self._config)
            self._pace = self._pace or Pace(
                groups_per_step=config.groups_per_step, max_staleness=config.max_staleness, step=version
            )
        return self._pace

    def _end(self, pace: Pace, slot: GroupSlot) -> None:
        if slot.group is None or not len(slot.group):
            pace.lose(slot.number)
        else:
            self._groups[slot.number] = slot.group
            pace.finish(slot.number)
        self._changed.set()

    async def _until(self, is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            self._changed.clear()
            await self._changed.wait()
