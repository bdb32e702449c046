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
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from art.client import ArtClient
from art.client.waiting import progress_bar
from art.errors import ConfigError, ProcessError
from art.protocol.rollouts import MAX_PAGE, RolloutQuery, RolloutRecord, RolloutStatus
from art.trajectory import History, PydanticException, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

POLL_S = 0.5
_MAX_FETCHES = 16
"""Limit of records that are fetched at the same time."""
_MAX_HANDED_OUT = 3
"""Times that a group is handed out. If its job fails each time, the group itself is probably at fault."""


def load_trajectory(record: RolloutRecord, leave_out: re.Pattern[str] | None = None) -> Trajectory:
    """Make a trajectory of a recorded rollout: its longest conversation first, and its reward if it has one.

    Conversations in whose system prompt `leave_out` is found are no part of it.
    """
    histories = [
        _load_history(item) for item in record.histories if leave_out is None or not _is_about(item, leave_out)
    ]
    main = max(histories, key=lambda history: len(history.messages_and_choices), default=History())
    told = {"scenario_id": record.scenario_id, "outcome": record.outcome, "error": record.error}
    metadata = record.metadata | {key: value for key, value in told.items() if value not in (None, "ok")}
    return Trajectory(
        messages_and_choices=main.messages_and_choices,
        tools=main.tools,
        additional_histories=[history for history in histories if history is not main],
        **({} if record.reward is None else {"reward": record.reward}),
        metrics=record.metrics,
        metadata=metadata | {"rollout_id": record.rollout_id},
        initial_policy_version=record.first_policy_version,
        final_policy_version=record.last_policy_version,
    )


def _is_about(history: Mapping[str, Any], pattern: re.Pattern[str]) -> bool:
    """Whether a pattern is found in the system prompt of a conversation."""
    messages = history["messages_and_choices"]
    return any(item.get("role") == "system" and pattern.search(item["content"] or "") for item in messages)


def _load_history(data: Mapping[str, Any]) -> History:
    items = [item["choice"] if item.keys() == {"choice"} else item for item in data["messages_and_choices"]]
    return History(messages_and_choices=items, tools=data.get("tools"))


@dataclass(slots=True)
class RolloutCollector:
    """Collects finished rollouts of one model, group by group."""

    connect: Callable[[], Awaitable[ArtClient]]
    project: str
    name: str
    _waiting: dict[str, dict[str, RolloutStatus]] = field(default_factory=dict)
    """Finished rollouts by group and id; groups are in the order of their first rollout."""
    _handed_out: dict[str, dict[str, RolloutStatus]] = field(default_factory=dict)
    _times_handed_out: Counter[str] = field(default_factory=Counter)
    _set_aside: dict[str, str] = field(default_factory=dict)
    """Groups that cannot be trained, with the reason."""
    _num_ungrouped: int = 0
    _since: int = 0

    async def collect(
        self,
        num_groups: int,
        rollouts_per_group: int,
        *,
        timeout_s: float | None,
        pbar_desc: str | None,
        leave_out: str | None = None,
    ) -> list[TrajectoryGroup]:
        """Wait for complete groups and return them: groups that were never handed out first, then the oldest.

        A rollout that ended as `infra_fault`, or never asked the model anything, becomes an exception of its group, and
        so does one whose conversations are all left out.

        Args:
            leave_out: regular expression that is looked for in the system prompt of each conversation.

        Raises:
            ConfigError: a number is below 1, or `leave_out` is no regular expression.
            ProcessError: `timeout_s` seconds have passed; the rollouts so far are kept for the next call.
        """
        if num_groups < 1 or rollouts_per_group < 1:
            raise ConfigError(
                f"`num_groups` and `rollouts_per_group` must be >= 1, got {num_groups} and {rollouts_per_group}"
            )
        try:
            pattern = None if leave_out is None else re.compile(leave_out)
        except re.error as error:
            raise ConfigError(f"`leave_out` is no regular expression: {leave_out!r}: {error}") from None
        client = await self.connect()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with progress_bar(pbar_desc, num_groups * rollouts_per_group) as pbar:
            while True:
                await self._update(client)
                complete = [group for group, rollouts in self._waiting.items() if len(rollouts) >= rollouts_per_group]
                complete.sort(key=self._times_handed_out.__getitem__)
                _show(pbar, self._waiting, num_groups * rollouts_per_group)
                if len(complete) >= num_groups:
                    chosen = complete[:num_groups]
                    groups = [
                        await _load_group(client, list(self._waiting[group].values()), pattern) for group in chosen
                    ]
                    self._take(chosen)
                    return groups
                if deadline is not None and time.monotonic() > deadline:
                    raise ProcessError(self._what_is_missing(len(complete), num_groups, rollouts_per_group, timeout_s))
                await asyncio.sleep(POLL_S)

    async def _update(self, client: ArtClient) -> None:
        """Fetch the rollouts that were finished since the last call."""
        model = f"{self.project}/{self.name}"
        while True:
            query = RolloutQuery(
                project=self.project, model=model, finished=True, trained=False, since=self._since, limit=MAX_PAGE
            )
            page = await client.list_rollouts(query)
            for rollout in page.rollouts:
                self._add(rollout)
            self._since = page.next_since
            if len(page.rollouts) < MAX_PAGE:
                return

    def _add(self, rollout: RolloutStatus) -> None:
        group, rollout_id = rollout.group_id, rollout.rollout_id
        if group is None:
            self._num_ungrouped += 1
        elif group in self._set_aside:
            pass
        elif rollout.untrainable is not None:
            self._leave_out(group, rollout.untrainable)
        elif group in self._waiting or group not in self._handed_out:
            self._waiting.setdefault(group, {})[rollout_id] = rollout
        elif rollout_id not in self._handed_out[group]:
            logger.warning("rollout %s is too late: its group %s was handed out without it", rollout_id, group)
        else:
            self._take_back(group)

    def _leave_out(self, group: str, reason: str) -> None:
        """Never hand out a group again that a training call refused: the same call would be refused again."""
        self._set_aside[group] = reason
        self._waiting.pop(group, None)
        self._handed_out.pop(group, None)
        for other in self._times_handed_out:  # its calls failed because of this group
            self._times_handed_out[other] = 1
        logger.warning("group %s cannot be trained and is set aside: %s", group, reason)

    def _take_back(self, group: str) -> None:
        """Hand out a group again whose job failed; the server says so by listing its rollouts again.

        Rollouts that are never trained, because they never asked the model, are not listed, so the whole group is taken
        as it was.
        """
        if (times := self._times_handed_out[group]) < _MAX_HANDED_OUT:
            self._waiting[group] = self._handed_out[group]
        else:
            logger.warning("group %s was handed out %d times, and every training of it failed: dropped", group, times)

    def _take(self, groups: list[str]) -> None:
        for group in groups:
            self._handed_out[group] = self._waiting.pop(group)
            self._times_handed_out[group] += 1

    def _what_is_missing(self, complete: int, num_groups: int, rollouts_per_group: int, timeout_s: float | None) -> str:
        begun = [f"{group!r} has {len(rollouts)}" for group, rollouts in self._waiting.items()]
        ungrouped = f" {self._num_ungrouped} finished rollouts have no group_id." if self._num_ungrouped else ""
        aside = "".join(f" Group {group!r} is set aside: {why}." for group, why in list(self._set_aside.items())[:1])
        return (
            f"after {timeout_s:g} s {complete} of {num_groups} groups of {self.project}/{self.name} have "
            f"{rollouts_per_group} finished rollouts; begun are: {', '.join(begun[:5]) or 'none'}.{ungrouped}{aside} "
            'Finish rollouts that died with PUT /api/rollouts/{rollout_id} and {"outcome": "infra_fault"}'
        )


async def _load_group(
    client: ArtClient, rollouts: list[RolloutStatus], leave_out: re.Pattern[str] | None
) -> TrajectoryGroup:
    gate = asyncio.Semaphore(_MAX_FETCHES)

    async def fetch(rollout: RolloutStatus) -> Trajectory | PydanticException:
        if rollout.outcome == "infra_fault" or not rollout.num_exchanges:
            message = rollout.error or ("no reason was given" if rollout.num_exchanges else "it never asked the model")
            return _fault(rollout, message)
        async with gate:
            record = await client.get_rollout(rollout.rollout_id, project=rollout.project)
        trajectory = load_trajectory(record, leave_out)
        return trajectory if trajectory.messages_and_choices else _fault(rollout, "`leave_out` left nothing of it")

    fetched = await asyncio.gather(*(fetch(rollout) for rollout in rollouts))
    return TrajectoryGroup(
        [item for item in fetched if isinstance(item, Trajectory)],
        exceptions=[item for item in fetched if isinstance(item, PydanticException)],
        metadata={"group_id": rollouts[0].group_id},
    )


def _fault(rollout: RolloutStatus, message: str) -> PydanticException:
    return PydanticException(type="infra_fault", message=f"rollout {rollout.rollout_id}: {message}", traceback="")


def _show(pbar: Any, waiting: dict[str, dict[str, RolloutStatus]], total: int) -> None:
    rewards = [r.reward for rollouts in waiting.values() for r in rollouts.values() if r.reward is not None]
    num_finished = sum(map(len, waiting.values()))
    pbar.n = min(num_finished, total)
    pbar.set_postfix({"reward": sum(rewards) / len(rewards)} if rewards else {})
