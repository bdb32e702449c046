"""SkyPilot's program `sky`: found and run.

SkyPilot is used as a program from an environment of its own, since the versions that it needs fight those of others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art.backends.ssh.ssh import Completed, run_process
from art.errors import ConfigError, MachineError, UnreachableError
from art.utils.retry import retry

EXECUTABLE_VARIABLE = "ART_SKY"
MIN_VERSION = (0, 14)
"""The first release with which this part was tried."""
_PROJECT_CONFIG = "SKYPILOT_PROJECT_CONFIG"
QUESTION_TIMEOUT_S = 300.0
"""Seconds for an answer. The first question also starts SkyPilot's own server on this machine."""
CHANGE_TIMEOUT_S = 3600.0
"""Seconds that finding and starting a machine, stopping or deleting it may take."""
NUM_TRIES = 4
"""How often a command is given whose answer is lost. What it began goes on in SkyPilot's server, and is joined."""
RETRY_DELAY_S = 1.0
SHOWN_CHARACTERS = 1200
"""How much of SkyPilot's own message an error quotes."""
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NO_ANSWER = re.compile(
    r"ApiServerConnectionError|ServerTemporarilyUnavailable|API server process exited"
    r"|requests error \(ConnectionError\)|Failed to connect to SkyPilot API server(?![^\n]*Starting a local server)"
)
"""SkyPilot's output when its own server gives no answer. The first command also says that, and then starts it."""


class Sky:
    """The program `sky`, which is looked for when it is first needed."""

    def __init__(self, executable: str | Path | None = None) -> None:
        """
        Args:
            executable: path of the program; by default that of ART_SKY, then `sky` on PATH.
        """
        self._executable = str(executable) if executable else None
        self._found: str | None = None

    async def find(self) -> str:
        """Return the path of the program, whose version has been checked.

        Raises:
            ConfigError: there is none, or it is too old.
        """
        if self._found is None:
            path = self._locate()
            ran = await _run([path, "--version"], QUESTION_TIMEOUT_S)
            version = re.search(r"version (\d+)\.(\d+)(\S*)", ran.stdout)
            if ran.rc != 0 or version is None:
                raise ConfigError(f"{path} is not SkyPilot's program: `{path} --version` gave {ran.stdout[-300:]!r}")
            if (int(version[1]), int(version[2])) < MIN_VERSION:
                oldest = ".".join(map(str, MIN_VERSION))
                raise ConfigError(f"{path} is SkyPilot {version[1]}.{version[2]}{version[3]}, and ART needs {oldest}")
            self._found = path
        return self._found

    def _locate(self) -> str:
        named = self._executable or os.environ.get(EXECUTABLE_VARIABLE) or "sky"
        path = shutil.which(str(Path(named).expanduser()))
        if path is None:
            raise ConfigError(
                f"there is no program {named!r}: SkyPilot finds and rents the machines. `uv tool install "
                f"'skypilot[aws]'` installs it for AWS; or name its program `sky` in {EXECUTABLE_VARIABLE}"
            )
        return os.path.abspath(path)  # it runs in another folder

    @retry(NUM_TRIES, delay=RETRY_DELAY_S, backoff_factor=1.0, exceptions=(UnreachableError,))
    async def run(
        self,
        *arguments: str,
        timeout_s: float = QUESTION_TIMEOUT_S,
        on_line: Callable[[str], None] | None = None,
    ) -> str:
        """Run `sky` in its own folder until it has given an answer, and return what it printed, without colours.

        In the caller's folder, a script of the name `sky.py` would be imported in place of SkyPilot.

        Args:
            arguments: paths among them are absolute.
            on_line: called with each line of standard output as it comes.

        Raises:
            ConfigError: there is no usable `sky`.
            MachineError: SkyPilot refuses or fails; the message says why in its own words.
            UnreachableError: it gave no answer in time, again and again.
        """
        ran = await _run([await self.find(), *arguments], timeout_s, on_line)
        text = f"{ran.stdout}\n{ran.stderr}".strip()
        if ran.rc < 0 or (ran.rc > 0 and _NO_ANSWER.search(text)):
            raise UnreachableError(
                f"SkyPilot's own server does not answer `sky {arguments[0]}`; `sky api info` says where it is "
                f"expected, `sky api start` starts it. SkyPilot said:\n{text[-SHOWN_CHARACTERS:]}"
            )
        # `sky stop` and `sky down` exit with 0 even if they fail.
        if ran.rc != 0 or "Cluster(s) failed" in text:
            raise MachineError(f"`sky {arguments[0]}` failed. SkyPilot said:\n{text[-SHOWN_CHARACTERS:]}")
        return ran.stdout

    async def status(self, cluster: str) -> dict[str, Any] | None:
        """Return SkyPilot's row about a cluster, as the cloud says it now; `None` if there is none.

        It also renews the cluster's alias in `~/.ssh/config`.
        """
        printed = await self.run("status", "--refresh", cluster, "-o", "json")
        # Lines for people may come before it, such as "Cluster(s) not found".
        start = re.search(r"^\[", printed, re.MULTILINE)
        try:
            rows: list[dict[str, Any]] = json.loads(printed[start.start() :] if start else "")
        except ValueError as error:
            raise MachineError(f"`sky status` gave no JSON: {printed[-300:]!r}; which version is it?") from error
        return next((row for row in rows if row.get("name") == cluster), None)


async def _run(command: list[str], timeout_s: float, on_line: Callable[[str], None] | None = None) -> Completed:
    def pass_on(line: str) -> None:
        if on_line is not None and (text := _COLOUR.sub("", line).rstrip()):
            on_line(text)

    ran = await run_process(
        command, timeout_s=timeout_s, on_line=pass_on, cwd=os.path.dirname(command[0]), env=_environment()
    )
    return Completed(ran.rc, _COLOUR.sub("", ran.stdout), _COLOUR.sub("", ran.stderr))


def _environment() -> dict[str, str]:
    """The environment of `sky`, which finds the settings of the caller's folder (`.sky.yaml`) from its own too."""
    config = Path(os.environ.get(_PROJECT_CONFIG, ".sky.yaml")).expanduser().absolute()
    return {**os.environ, _PROJECT_CONFIG: str(config)} if config.is_file() else dict(os.environ)
