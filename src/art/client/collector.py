"""Turns rollouts that other programs ran into groups for training.

    agents, in any language                            this process
    ask under /rollouts/{id}/v1
    PUT /api/rollouts/{id} {group_id, reward}   -->    groups = await model.collect_trajectory_groups(16, 8)
                                                       await backend.train(model, groups)

A group is complete when `rollouts_per_group` of its rollouts are finished, however they ended. A `RolloutCollector`
hands it out once, and again if the job that trained it failed or was cancelled. A group that a training call refused is
set aside, and the others of that call come again. After a restart the server still knows which rollouts were trained or
refused, and the collector hands out the others again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from art.client.client import ServerClient
from art.client.terminal import progress_bar
from art.errors import ConfigError, ProcessError
from art.protocol.rollouts import MAX_PAGE, RolloutQuery, RolloutRecord, RolloutStatus
from art.trajectory import History, PydanticException, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

POLL_S = 0.5
_MAX_FETCHES = 16
"""Limit of records that are fetched at the same time."""


def load_trajectory(record: RolloutRecord) -> Trajectory:
    """Make a trajectory of a recorded rollout: its longest conversation first, and its reward if it has one."""
    histories = []
    for data in record.histories:
        items = [item["choice"] if item.keys() == {"choice"} else item for item in data["messages_and_choices"]]
        histories.append(History(messages_and_choices=items, tools=data.get("tools")))
    main = max(histories, key=lambda history: len(history.messages_and_choices), default=History())
    told = {"scenario_id": record.scenario_id, "outcome": record.outcome, "error": record.error}
    metadata = record.metadata | {key: value for key, value in told.items() if value not in (None, "ok")}
    return Trajectory(
        messages_and_choices=main.messages_and_choices, tools=main.tools,
        additional_histories=[history for history in histories if history is not main],
        **({} if record.reward is None else {"reward": record.reward}), metrics=record.metrics,
        metadata=metadata | {"rollout_id": record.rollout_id},
        initial_policy_version=record.first_policy_version, final_policy_version=record.last_policy_version,
    )  # fmt: skip


@dataclass(slots=True)
class RolloutCollector:
    """Collects finished rollouts of one model, group by group."""

    connect: Callable[[], Awaitable[ServerClient]]
    project: str
    name: str
    _waiting: dict[str, dict[str, RolloutStatus]] = field(default_factory=dict)
    """Finished rollouts by group and id; groups are in the order of their first rollout."""
    _handed_out: dict[str, dict[str, RolloutStatus]] = field(default_factory=dict)
    _set_aside: dict[str, str] = field(default_factory=dict)
    """Groups that cannot be trained, with the reason."""
    _num_ungrouped: int = 0
    _since: int = 0

    async def collect(
        self, num_groups: int, rollouts_per_group: int, *, timeout_s: float | None, pbar_desc: str | None
    ) -> list[TrajectoryGroup]:
        """Wait for complete groups and return the oldest.

        A rollout that ended as `infra_fault`, or never asked the model anything, becomes an exception of its group.

        Raises:
            ConfigError: a number is below 1.
            ProcessError: `timeout_s` seconds have passed; the rollouts so far are kept for the next call.
        """
        if num_groups < 1 or rollouts_per_group < 1:
            raise ConfigError(
                f"`num_groups` and `rollouts_per_group` must be >= 1, got {num_groups} and {rollouts_per_group}"
            )
        client = await self.connect()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with progress_bar(pbar_desc, num_groups * rollouts_per_group) as pbar:
            while True:
                await self._update(client)
                complete = [group for group, rollouts in self._waiting.items() if len(rollouts) >= rollouts_per_group]
                finished = [one for rollouts in self._waiting.values() for one in rollouts.values()]
                rewards = [one.reward for one in finished if one.reward is not None]
                pbar.n = min(len(finished), num_groups * rollouts_per_group)
                pbar.set_postfix({"reward": sum(rewards) / len(rewards)} if rewards else {})
                if len(complete) >= num_groups:
                    chosen = complete[:num_groups]
                    groups = [await _load_group(client, list(self._waiting[group].values())) for group in chosen]
                    for group in chosen:
                        self._handed_out[group] = self._waiting.pop(group)
                    return groups
                if deadline is not None and time.monotonic() > deadline:
                    raise ProcessError(self._what_is_missing(len(complete), num_groups, rollouts_per_group, timeout_s))
                await asyncio.sleep(POLL_S)

    async def _update(self, client: ServerClient) -> None:
        """Fetch the rollouts that were finished since the last call."""
        model, num_listed = f"{self.project}/{self.name}", MAX_PAGE
        while num_listed == MAX_PAGE:
            page = await client.list_rollouts(
                RolloutQuery(
                    project=self.project, model=model, finished=True, trained=False, since=self._since, limit=MAX_PAGE
                )
            )
            for rollout in page.rollouts:
                self._add(rollout)
            self._since, num_listed = page.next_since, len(page.rollouts)

    def _add(self, rollout: RolloutStatus) -> None:
        group, rollout_id = rollout.group_id, rollout.rollout_id
        if group is None:
            self._num_ungrouped += 1
        elif group in self._set_aside:
            pass
        elif rollout.untrainable is not None:  # the same call would be refused again: it is never handed out again
            self._set_aside[group] = rollout.untrainable
            self._waiting.pop(group, None)
            self._handed_out.pop(group, None)
            logger.warning("group %s cannot be trained and is set aside: %s", group, rollout.untrainable)
        elif group in self._waiting or group not in self._handed_out:
            self._waiting.setdefault(group, {})[rollout_id] = rollout
        elif rollout_id not in self._handed_out[group]:
            logger.warning("rollout %s is too late: its group %s was handed out without it", rollout_id, group)
        else:
            # The server lists rollouts again whose job failed, but none that never asked the model: the whole group is
            # taken as it was.
            self._waiting[group] = self._handed_out[group]

    def _what_is_missing(self, complete: int, num_groups: int, rollouts_per_group: int, timeout_s: float | None) -> str:
        begun = [f"{group!r} has {len(rollouts)}" for group, rollouts in self._waiting.items()]
        ungrouped = f" {self._num_ungrouped} finished rollouts have no group_id." if self._num_ungrouped else ""
        aside = "".join(f" Group {group!r} is set aside: {why}." for group, why in list(self._set_aside.items())[:1])
        return (
            f"after {timeout_s:g} s {complete} of {num_groups} groups of {self.project}/{self.name} have "
            f"{rollouts_per_group} finished rollouts; begun are: {', '.join(begun[:5]) or 'none'}.{ungrouped}{aside} "
            'Finish rollouts that died with PUT /api/rollouts/{rollout_id} and {"outcome": "infra_fault"}'
        )


async def _load_group(client: ServerClient, rollouts: list[RolloutStatus]) -> TrajectoryGroup:
    gate = asyncio.Semaphore(_MAX_FETCHES)

    async def fetch(rollout: RolloutStatus) -> Trajectory | PydanticException:
        if rollout.outcome == "infra_fault" or not rollout.num_exchanges:
            message = rollout.error or ("no reason was given" if rollout.num_exchanges else "it never asked the model")
            message = f"rollout {rollout.rollout_id}: {message}"
            return PydanticException(type="infra_fault", message=message, traceback="")
        async with gate:
            return load_trajectory(await client.get_rollout(rollout.rollout_id, project=rollout.project))

    fetched = await asyncio.gather(*(fetch(rollout) for rollout in rollouts))
    return TrajectoryGroup(
        [item for item in fetched if isinstance(item, Trajectory)],
        exceptions=[item for item in fetched if isinstance(item, PydanticException)],
        metadata={"group_id": rollouts[0].group_id},
    )
