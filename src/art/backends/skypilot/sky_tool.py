"""SkyPilot's program `sky`: found, installed on request, and run.

SkyPilot is used as a program from an environment of its own, since the versions that it needs fight those of others.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.backends.skypilot.failures import explain
from art.backends.ssh.ssh import end_process, read_lines, start_process
from art.errors import ConfigError, MachineError, UnreachableError

EXECUTABLE_VARIABLE = "ART_SKY"
MIN_VERSION = (0, 14)
"""The first release with which this part was tried: JSON answers of `sky status`, hooks before a machine goes."""
_PROJECT_CONFIG = "SKYPILOT_PROJECT_CONFIG"
QUESTION_TIMEOUT_S = 300.0
"""Seconds for an answer. The first question also starts SkyPilot's own server on this machine."""
TABLE_TIMEOUT_S = 90.0
"""Seconds for an answer about several clusters, which people wait for."""
INSTALL_TIMEOUT_S = 1800.0
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Ran:
    """How `sky` ended, and what it wrote, without colours."""

    rc: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return f"{self.stdout}\n{self.stderr}".strip()


class Sky:
    """The program `sky`, which is looked for when it is first needed."""

    def __init__(self, executable: str | Path | None = None) -> None:
        """
        Args:
            executable: path of the program; by default that of ART_SKY, then `sky` on PATH, then the one that
                `install_sky` has made.
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
            try:
                ran = await _run([path, "--version"], QUESTION_TIMEOUT_S)
            except OSError as error:
                raise ConfigError(f"{path} cannot be run: {error.strerror}") from error
            version = re.search(r"version (\d+)\.(\d+)(\S*)", ran.text)
            if ran.rc != 0 or version is None:
                raise ConfigError(f"{path} is not SkyPilot's program: `{path} --version` gave {ran.text[-300:]!r}")
            if (int(version[1]), int(version[2])) < MIN_VERSION and int(version[1]) < 1:
                oldest = ".".join(map(str, MIN_VERSION))
                raise ConfigError(
                    f"{path} is SkyPilot {version[1]}.{version[2]}{version[3]}, and ART needs {oldest} or newer; renew "
                    "it, or let ART make its own with `art launch --install-sky`"
                )
            self._found = path
        return self._found

    def _locate(self) -> str:
        named = self._executable or os.environ.get(EXECUTABLE_VARIABLE)
        if named:
            path = shutil.which(str(Path(named).expanduser()))
            if path is None:
                raise ConfigError(f"there is no program {named!r}; `sky` of SkyPilot was expected there")
            return path
        own = own_environment() / "bin" / "sky"
        program = shutil.which("sky") or (str(own) if own.exists() else None)
        if program is None:
            raise ConfigError(
                "there is no `sky` program: SkyPilot finds and rents the machines. `art launch --install-sky CLOUD` "
                f"installs it into {own_environment()}; or name one in {EXECUTABLE_VARIABLE}"
            )
        return program

    async def run(
        self,
        *arguments: str,
        timeout_s: float = QUESTION_TIMEOUT_S,
        on_line: Callable[[str], None] | None = None,
    ) -> Ran:
        """Run `sky` in its own folder, and wait for its end.

        In the caller's folder, a script of the name `sky.py` would be imported in place of SkyPilot.

        Args:
            arguments: paths among them are absolute.
            on_line: called with each line of standard output as it comes.

        Raises:
            ConfigError: there is no usable `sky`, or what was asked for is impossible.
            MachineError, UnreachableError: SkyPilot failed, or gave no answer in time.
        """
        path = await self.find()
        ran = await _run([path, *arguments], timeout_s, on_line)
        # `sky stop` and `sky down` exit with 0 even if they fail.
        if ran.rc != 0 or "Cluster(s) failed" in ran.text:
            raise explain(f"sky {arguments[0]}", ran.text)
        return ran

    async def ask(self, *arguments: str) -> list[dict[str, Any]]:
        """Run a command of `sky` that answers in JSON, and return its rows.

        Raises:
            UnreachableError: the answer is no JSON.
        """
        ran = await self.run(*arguments, "-o", "json")
        # Lines for people may come before it, such as "Cluster(s) not found".
        start = re.search(r"^\[", ran.stdout, re.MULTILINE)
        try:
            rows: list[dict[str, Any]] = json.loads(ran.stdout[start.start() :] if start else "")
        except ValueError as error:
            raise UnreachableError(
                f"`sky {' '.join(arguments)}` gave no JSON: {ran.text[-300:]!r}; which version of SkyPilot is it?"
            ) from error
        return rows


class SharedSky(Sky):
    """The program `sky` for a table of clusters: each question is asked once, about all of them, and not repeated."""

    def __init__(self, executable: str | Path | None, clusters: Sequence[str]) -> None:
        super().__init__(executable)
        self._clusters = tuple(clusters)
        self._asked: dict[tuple[str, ...], asyncio.Task[Any]] = {}

    async def find(self) -> str:
        path: str = await self._once(("--version",), super().find)
        return path

    async def ask(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the rows of an answer in JSON, which may have rows of other clusters.

        Raises:
            MachineError: there is no answer in time.
        """
        if arguments[0] == "status":
            arguments = ("status", "--refresh", *self._clusters)
        ask = super().ask
        rows: list[dict[str, Any]] = await self._once(arguments, lambda: ask(*arguments))
        return rows

    async def _once(self, question: tuple[str, ...], ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if question not in self._asked:
            asked = self._asked[question] = asyncio.create_task(_in_time(ask))
            asked.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # else unread failures are logged
        return await asyncio.shield(self._asked[question])


async def _in_time(ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    try:
        async with asyncio.timeout(TABLE_TIMEOUT_S):
            return await ask()
    except TimeoutError:
        raise MachineError(f"SkyPilot gave no answer within {TABLE_TIMEOUT_S:.0f} s") from None
    except UnreachableError as error:  # which a cluster would ask again
        raise MachineError(error.message) from error


def own_environment() -> Path:
    """Folder of the virtual environment that `install_sky` makes."""
    return Path.home() / ".art" / "skypilot"


async def install_sky(cloud: str, on_line: Callable[[str], None]) -> Path:
    """Install SkyPilot into an environment of its own, which no other package shares.

    Args:
        cloud: name of the extra of SkyPilot to install, such as `aws`, `gcp` or `kubernetes`.

    Returns:
        Path of `sky`.

    Raises:
        ConfigError: the name is malformed, or SkyPilot has no such cloud.
        MachineError: the installation failed.
    """
    if not re.fullmatch(r"[a-z0-9-]+", cloud):
        raise ConfigError(f"a cloud is a name like aws, gcp or kubernetes, got {cloud!r}")
    folder, package = own_environment(), f"skypilot[{cloud}]>={'.'.join(map(str, MIN_VERSION))}"
    python = folder / "bin" / "python"
    uv = shutil.which("uv")
    if uv:
        commands = [
            [uv, "venv", "--allow-existing", str(folder)],
            [uv, "pip", "install", "--python", str(python), package],
        ]
    else:
        commands = [[sys.executable, "-m", "venv", str(folder)], [str(python), "-m", "pip", "install", package]]
    for command in commands:
        ran = await _run(command, INSTALL_TIMEOUT_S, on_line)
        if ran.rc != 0:
            raise MachineError(f"installing SkyPilot into {folder} failed: {ran.text[-1500:]}")
        if re.search(r"does not (provide the|have an) extra", ran.text):  # only a warning of pip and uv
            raise ConfigError(f"SkyPilot has no cloud {cloud!r}; expected a name like aws, gcp or kubernetes")
    return folder / "bin" / "sky"


async def _run(command: list[str], timeout_s: float, on_line: Callable[[str], None] | None = None) -> Ran:
    program = _absolute(command[0])
    process = await start_process(
        program, *command[1:], stdin=asyncio.subprocess.DEVNULL, cwd=os.path.dirname(program), env=_environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None

    def pass_on(line: str) -> None:
        if on_line is not None and (text := _plain(line).rstrip()):
            on_line(text)

    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr, _ = await asyncio.gather(
                read_lines(process.stdout, pass_on), process.stderr.read(), process.wait()
            )
    except TimeoutError:
        what = " ".join(command[:2])
        raise UnreachableError(f"`{what}` did not end within {timeout_s:.0f} s") from None
    finally:
        await end_process(process)
    if process.returncode is not None and process.returncode < 0:
        raise UnreachableError(f"`{' '.join(command[:2])}` was killed by signal {-process.returncode}")
    return Ran(process.returncode or 0, _plain(stdout), _plain(stderr.decode(errors="replace")))


def _absolute(program: str) -> str:
    return os.path.abspath(program)  # PATH, ART_SKY and `--sky` may name it from the caller's folder


def _environment() -> dict[str, str]:
    """The environment of `sky`, which finds the settings of the caller's folder (`.sky.yaml`) from its own too."""
    config = Path(os.environ.get(_PROJECT_CONFIG, ".sky.yaml")).expanduser().absolute()
    return {**os.environ, _PROJECT_CONFIG: str(config)} if config.is_file() else dict(os.environ)


def _plain(text: str) -> str:
    return _COLOUR.sub("", text)
