"""`SkyServer`: the server of a SkyPilot machine, and the watch beside it, which decides when the machine goes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from art.backends.skypilot.task_file import NODE_ADDRESS, SET_UP
from art.backends.ssh.remote_server import Progress, RemoteServer, ServerState
from art.backends.ssh.ssh import shell_path
from art.errors import MachineError, UnreachableError

_QUESTION_TIMEOUT_S = 30.0
_TIME = "date +'time %s'"
"""Prints the machine's clock, in a form that a login shell's greeting has not."""
_WAIT_S = 30
"""Seconds that one command waits on the machine."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What the watch on the machine has seen."""

    idle_s: float
    """Seconds since anything was asked of the server."""
    ended: str | None
    """Why the watch has ended, so that the machine goes soon; `None` while it goes on."""


class SkyServer(RemoteServer):
    """A server whose machine goes when its watch ends."""

    is_replaced = False
    """Whether machines are being replaced, so that the server must not be started again meanwhile."""

    async def ensure(self, progress: Progress | None = None) -> ServerState:
        """Return the state of the server, which is installed and started if it does not run.

        Raises:
            MachineError: its watch has ended, so the machine goes soon and a server would not live there.
        """
        state = await self.status()
        if state is None or not state.is_running:
            watched = await self.watched()
            if watched is not None and watched.ended:
                raise MachineError(
                    f"the machine of {self.name!r} goes soon: {watched.ended}. The next call that trains, registers or "
                    "lists gets another one"
                )
        return await super().ensure(progress)

    async def revive(self) -> ServerState:
        """Start the server again if it does not run.

        Raises:
            UnreachableError: machines of the cluster are being replaced.
        """
        if self.is_replaced:
            raise UnreachableError(f"machines of {self.name!r} are being replaced")
        return await super().revive()

    async def watched(self) -> Watched | None:
        """Return what the watch has seen; `None` if it has not begun.

        Raises:
            UnreachableError: the machine cannot be reached.
        """
        done = await self.ssh.run(
            f"{_TIME}; cat {shell_path(self.folder)}/watch.json", timeout_s=_QUESTION_TIMEOUT_S
        )  # fmt: skip
        now, content = _read_time(done.stdout)
        if done.rc != 0 or not content:
            return None
        try:
            seen = json.loads(content)
            return Watched(idle_s=max(0.0, now - float(seen["last_active_at"])), ended=seen["ended"])
        except (ValueError, KeyError, TypeError) as error:
            raise UnreachableError(f"{self.ssh.name} answered about its watch with {content[:100]!r}") from error

    async def until_set_up(self, timeout_s: float) -> None:
        """Wait until the set-up of the task file has ended.

        Raises:
            MachineError: it has not within `timeout_s` seconds; SkyPilot's log of the job says why.
        """
        done_file = f"{shell_path(self.folder)}/{SET_UP}"
        script = f"for second in $(seq {_WAIT_S}); do test -e {done_file} && exit 0; sleep 1; done; exit 3"
        deadline = time.monotonic() + timeout_s
        while (await self.ssh.run(script, timeout_s=_WAIT_S + _QUESTION_TIMEOUT_S)).rc != 0:
            if time.monotonic() > deadline:
                raise MachineError(
                    f"the set-up of {self.name!r} did not end within {timeout_s / 60:.0f} minutes; "
                    f"`sky logs {self.name}` says why"
                )

    async def forget_job(self) -> None:
        """Remove what an earlier job of the task file has left: that it was set up, and what its watch saw."""
        files = " ".join(f"{shell_path(self.folder)}/{name}" for name in ("watch.json", SET_UP))
        await self.ssh.run(f"rm -f {files}", timeout_s=_QUESTION_TIMEOUT_S)

    async def node_address(self) -> str | None:
        """Return the machine's address in the network of its cluster; `None` if SkyPilot has told none."""
        path = f"{shell_path(self.folder)}/{NODE_ADDRESS}"
        done = await self.ssh.run(f'echo "address $(cat {path})"', timeout_s=_QUESTION_TIMEOUT_S)
        line = re.search(r"address (\S+)$", done.stdout, re.MULTILINE)  # a login shell may print something first
        return line and line[1]

    async def has_data(self) -> bool:
        """Whether a server has worked in the data directory."""
        done = await self.ssh.run(f"test -e {shell_path(self.folder)}/data/art.db", timeout_s=_QUESTION_TIMEOUT_S)
        return done.rc == 0

    async def bring_back(self, copy: str) -> bool:
        """Fill the data directory from a copy on the same machine, such as a mounted bucket.

        Returns:
            Whether there is a copy.

        Raises:
            MachineError: there is a copy, and it cannot be read.
        """
        folder, source = shell_path(self.folder), shell_path(copy)
        program = f"{folder}/venv/bin/python -m art.backends.skypilot.copying"
        done = await self.ssh.run(
            f"test -e {source}/art.db || exit 3; {program} bring {source} {folder}/data", timeout_s=3600.0
        )  # fmt: skip
        if done.rc not in (0, 3):
            raise MachineError(f"{self.ssh.name}: filling the data directory from {copy} failed: {done.stderr[-800:]}")
        return done.rc == 0

    async def set_secrets(self, environment: Mapping[str, str], api_key: str | None) -> None:
        """Leave variables for the server, and the key that its clients have, in files that only its owner can read.

        A machine that has a key already keeps it.
        """
        await self.ssh.put(json.dumps(dict(environment)).encode(), f"{self.folder}/environment.json")
        if api_key is not None:
            done = await self.ssh.run(f"test -e {shell_path(self.folder)}/api.key", timeout_s=_QUESTION_TIMEOUT_S)
            if done.rc != 0:
                await self.ssh.put(api_key.encode(), f"{self.folder}/api.key")

    async def set_end(self, hours_left: float) -> None:
        """Tell the watch when the budget will be spent, by the clock of the machine."""
        done = await self.ssh.run(_TIME, timeout_s=_QUESTION_TIMEOUT_S)
        now, _ = _read_time(done.stdout)
        limit = json.dumps({"ends_at": now + 3600 * max(0.0, hours_left)})
        await self.ssh.put(limit.encode(), f"{self.folder}/limit.json")


def _read_time(printed: str) -> tuple[float, str]:
    """Return the clock that `_TIME` has printed, or the one here, and what was printed after it."""
    if (clock := re.search(r"time (\d+)\n", printed)) is None:
        return time.time(), ""
    return float(clock[1]), printed[clock.end() :]
