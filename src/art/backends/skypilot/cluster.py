"""`Cluster`: one machine of SkyPilot by its name: looked for, launched, stopped, taken down, and what it has cost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.backends.skypilot.sky_tool import Sky
from art.errors import MachineError, UnreachableError

logger = logging.getLogger(__name__)

NUM_TRIES = 4
"""How often a command of `sky` is repeated whose answer was lost."""
RETRY_DELAY_S = 3.0
STOP_TIMEOUT_S = 1800.0
"""Seconds that stopping or deleting a machine may take, with its hooks."""
_PRICED_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What SkyPilot knows about a cluster."""

    status: str
    """`UP`, `STOPPED`, or `INIT` while it is launched or broken."""
    cloud: str
    region: str
    resources: str
    """The machine in SkyPilot's words."""
    goes_after: str
    """What becomes of it after how many idle minutes; empty if nothing does."""

    @property
    def is_up(self) -> bool:
        return self.status == "UP"

    def describe(self) -> str:
        """One line for people."""
        where = "/".join(part for part in (self.cloud, self.region) if part)
        return f"{self.status} on {where or 'an unknown cloud'}: {self.resources}{self.goes_after}"


@dataclass(frozen=True, slots=True)
class Spent:
    """What machines of one name have cost, by SkyPilot's prices."""

    usd: float
    usd_per_hour: float | None
    """Price of the newest machine; `None` until SkyPilot knows how long it has run."""


class Cluster:
    """One cluster of SkyPilot, of one machine."""

    def __init__(self, name: str, sky: Sky) -> None:
        self.name = name
        self.sky = sky

    async def state(self) -> ClusterState | None:
        """Return what the cloud says now about the cluster; `None` if there is none. Renews its ssh alias too.

        Raises:
            ConfigError, MachineError, UnreachableError: SkyPilot cannot tell.
        """
        rows = await self._again(lambda: self.sky.ask("status", "--refresh", self.name))
        row = next((row for row in rows if row.get("name") == self.name), None)
        return None if row is None else _read_state(row)

    async def launch(self, task_file: Path, *, timeout_s: float, on_line: Callable[[str], None]) -> None:
        """Rent and start the machine, or give a running one the job of the task file again.

        A launch whose answer is lost goes on in SkyPilot's server. It is asked for again, which joins or repeats it.

        Args:
            timeout_s: seconds that a try may take.

        Raises:
            ConfigError: it is impossible as asked for; the message says why.
            MachineError: no machine is free, or the account may not have it.
            UnreachableError: SkyPilot gave no answer.
        """
        await self._again(
            lambda: self.sky.run(
                "launch", "--cluster", self.name, "--yes", "--detach-run", str(task_file.absolute()),
                timeout_s=timeout_s, on_line=on_line,
            )
        )  # fmt: skip
        state = await self.state()
        if state is None or not state.is_up:
            what = "there is no such cluster" if state is None else state.describe()
            raise UnreachableError(f"SkyPilot launched {self.name!r}, and it is gone again: {what}")

    async def stop(self) -> None:
        """Stop the machine and keep its disk.

        Raises:
            ConfigError: its cloud cannot, or it is a spot machine.
        """
        await self._again(lambda: self.sky.run("stop", "--yes", self.name, timeout_s=STOP_TIMEOUT_S))

    async def down(self) -> None:
        """Delete the machine with its disk. If there is none, nothing is done.

        Raises:
            MachineError: it still exists afterwards, and costs money.
        """
        await self._again(lambda: self.sky.run("down", "--yes", self.name, timeout_s=STOP_TIMEOUT_S))
        state = await self.state()
        if state is not None:
            raise MachineError(
                f"the cluster {self.name!r} is not gone: {state.describe()}. It costs money until it is; try "
                f"`sky down {self.name}`, and look at the cloud's own console"
            )

    async def spent(self, since: float) -> Spent:
        """Return what the machines of this name have cost.

        Args:
            since: seconds since 1970; machines that were launched before do not count.
        """
        rows = await self._again(lambda: self.sky.ask("cost-report", "--all", "--days", "0"))
        ours = [row for row in rows if row.get("name") == self.name]
        usd = sum(float(row.get("total_cost") or 0.0) for row in ours if _launched_at(row) >= int(since))
        newest: dict[str, Any] = max(ours, key=_launched_at, default={})
        duration_s = float(newest.get("duration") or 0.0)
        has_price = newest.get("status") != "TERMINATED" and duration_s >= _PRICED_AFTER_S
        return Spent(usd, float(newest.get("total_cost") or 0.0) / duration_s * 3600 if has_price else None)

    async def _again(self, command: Callable[[], Any]) -> Any:
        for tries_left in reversed(range(NUM_TRIES)):
            try:
                return await command()
            except UnreachableError as error:
                if not tries_left:
                    raise
                logger.warning("SkyPilot gave no answer about %s; it is asked again: %s", self.name, error)
                await asyncio.sleep(RETRY_DELAY_S)
        raise AssertionError


def _launched_at(row: dict[str, Any]) -> float:
    return float(row.get("launched_at") or 0)


def _read_state(row: dict[str, Any]) -> ClusterState:
    minutes = row.get("autostop")
    goes_after = ""
    if isinstance(minutes, int) and minutes >= 0:
        goes_after = f", {'deleted' if row.get('to_down') else 'stopped'} after {minutes} idle minutes"
    return ClusterState(
        status=str(row.get("status")), cloud=str(row.get("cloud") or ""), region=str(row.get("region") or ""),
        resources=str(row.get("resources_str_full") or row.get("resources_str") or ""), goes_after=goes_after,
    )  # fmt: skip
