"""`RemoteServer`: an `art-server` on another machine: looked for, installed, started, asked, stopped, removed.

Everything of one server is in one folder there; docs/ssh.md lists its files. The work there is done by `keeper.py`,
which is copied into the folder. Every command is safe to repeat, after a lost connection too.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from art.backends.ssh.install import Install, make_package
from art.backends.ssh.install_progress import told
from art.backends.ssh.probing import Machine, probe_script, read_machine
from art.backends.ssh.ssh import Completed, Ssh, shell_path
from art.config import NodesConfig, ServerConfig
from art.errors import ConfigError, MachineError, UnreachableError

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 90.0
NUM_TRIES = 5
"""How often a command is sent again whose connection broke."""
RETRY_DELAY_S = 1.0
Progress = Callable[[str], None]
"""Called with a line about each long step."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the other machine says about a server."""

    is_running: bool
    """Whether the keeper runs, which restarts the server whenever it dies."""
    port: int
    """Port on the loopback of the other machine."""
    server_pid: int
    num_starts: int
    """How often the server has been started since the keeper runs."""
    last_exit: str
    """How the server ended the last time; empty if it never did."""
    failure: str
    """Why the keeper has given up; empty if it has not."""
    log_start: int
    """Size of the server's log at its last start, in bytes."""
    version: str
    """Version of the ART that is installed; empty if none is."""
    digest: str
    """Digest of what was installed."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings that the server was started with."""
    api_key: str = field(default="", repr=False)


class FurtherMachines(Protocol):
    """What a server asks of its further machines; see `ssh_nodes.Nodes`."""

    @property
    def named(self) -> Sequence[object]: ...
    def check_running(self, config: dict[str, Any]) -> dict[str, Any]: ...
    async def install(self, progress: Progress) -> None: ...
    async def join(self, progress: Progress) -> NodesConfig: ...


class RemoteServer:
    """One server on another machine, by its name there."""

    def __init__(
        self, ssh: Ssh, *, name: str = "default", install: Install | None = None, config: ServerConfig | None = None
    ) -> None:
        """
        Args:
            name: name of the server, of letters, digits, `-` and `_`; several servers of an account differ in it.
            config: settings of the server. Host is loopback; a port other than the default is asked for there.

        Raises:
            ConfigError: the name or the folder is malformed, or the config names a host.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
            raise ConfigError(f"a server's name has letters, digits, - and _ only, got {name!r}", param="name")
        if config is not None and config.host != "127.0.0.1":
            raise ConfigError(f"the server listens on its loopback only, reached by a tunnel; got host={config.host!r}")
        self.ssh = ssh
        self.name = name
        self.install_settings = install or Install()
        self.folder = (self.install_settings.folder or f"~/.art/servers/{name}").rstrip("/")
        if not self.folder.startswith(("/", "~/")) or len(self.folder) < 4:
            raise ConfigError(f"folder must be absolute or begin with ~/, got {self.folder!r}", param="folder")
        self._config = config
        self.nodes: FurtherMachines | None = None
        """Further machines that are installed and started with this one."""

    @property
    def data_dir(self) -> str:
        """Data directory on the other machine."""
        return f"{self.folder}/data"

    async def ensure(self, progress: Progress | None = None) -> ServerState:
        """Return the state of the server, which is installed and started if it does not run.

        Raises:
            ConfigError: it runs with other settings or machines than were asked for.
            MachineError: it cannot be installed or started; the message says why.
        """
        say = progress or _silent
        state = await self.status()
        if state is not None and state.is_running:
            self._check_running(state, say)
            return state
        await (self.install(progress) if self._joins is None else self._joins.install(say))
        return await self.start(progress)

    async def revive(self) -> ServerState:
        """Start the server again if it does not run, with what is installed already and the settings of before.

        Raises:
            MachineError: it cannot be started; the message says why.
        """
        state = await self.status()
        if state is not None and state.is_running:
            return state
        if state is None or not state.digest:
            return await self.ensure()
        try:
            return await self.start()
        except MachineError as error:
            if self._joins is None or "nodes" not in state.config:
                raise
            logger.warning("%s: the server starts with nodes that could not be joined again: %s", self.ssh.name, error)
            return await self._start(None)

    def _check_running(self, state: ServerState, say: Progress) -> None:
        asked = self._config_values()
        present = state.config if self.nodes is None else self.nodes.check_running(state.config)
        if asked is not None and asked != present:
            raise ConfigError(
                f"the server in {self.folder} on {self.ssh.name} runs already, with other settings: {present} "
                f"instead of {asked}. Stop it first (`art launch stop`, or `stop()` of its backend), or choose "
                "another name"
            )
        package = make_package(self.install_settings)
        if package.digest and state.digest != package.digest:
            say(f"{self.ssh.name}: the server runs ART {state.version} of an earlier installation; stop it to renew it")

    async def probe(self) -> Machine:
        """Ask what the machine has: system, disk space, Pythons, GPUs.

        Raises:
            MachineError: its shell cannot answer.
        """
        script = probe_script(self.folder, self.install_settings.python)
        done = await self.command("sh -s", input=script.encode())
        machine = read_machine(done.stdout)
        if machine is None:
            raise MachineError(f"{self.ssh.name} has no usable shell: {(done.stdout + done.stderr).strip()[-500:]}")
        return machine

    async def install(self, progress: Progress | None = None) -> None:
        """Install ART into an environment of the server's folder, unless it has been installed already.

        Raises:
            MachineError: there is no Python that is new enough, too little space, no GPU that the settings ask for, or
                pip failed.
        """
        say, name = progress or _silent, self.ssh.name
        package = make_package(self.install_settings)
        state = await self.status()
        if state is not None and state.digest and package.digest in ("", state.digest):
            return
        if not package.digest:
            raise MachineError(f"nothing is installed in {self.folder} on {name}; `art launch` installs ART there")
        machine = await self.probe()
        needs_gpu = self._config is not None and self._config.gpu
        python = machine.check(name, self.folder, self.install_settings, needs_gpu=needs_gpu)
        await self.ssh.put(_keeper(), f"{self.folder}/keeper.py")
        advice = machine.advice(self.install_settings)
        say(f"{name}: {machine.system}, {python}, {machine.free_bytes / 1e9:.0f} GB free{advice}")
        say(f"{name}: installing {package.describe()} into {self.folder}/venv (minutes, the first time)")
        if package.file is not None:
            await self.ssh.put(package.file[1], f"{self.folder}/{package.file[0]}", timeout_s=600)
        timeout_s = self.install_settings.timeout_s
        asked = {
            "target": package.target, "digest": package.digest, "index_url": self.install_settings.index_url,
            "timeout_s": timeout_s,
        }  # fmt: skip
        started = time.monotonic()
        async with told(name, say) as on_line:
            answer = await self._keeper_command("install", asked, python=python, timeout_s=timeout_s, on_line=on_line)
        say(f"{name}: ART {answer['version']} is installed ({time.monotonic() - started:.0f} s)")

    async def start(self, progress: Progress | None = None) -> ServerState:
        """Start the installed server, and return when it listens. If it runs, only its state is returned.

        The API key is made here when the server is first started, and is kept on the other machine for later starts.

        Raises:
            MachineError: its port is in use, or it does not start; or its machines cannot connect to each other.
        """
        say, values = progress or _silent, self._config_values()
        state = None if self._joins is None else await self.status()
        if self._joins is not None and state is not None and not state.is_running:
            joined = await self._joins.join(say)
            values = (state.config if values is None else values) | {"nodes": joined.model_dump(mode="json")}
        say(f"{self.ssh.name}: starting art-server in {self.folder}")
        return await self._start(values)

    async def _start(self, config: dict[str, Any] | None) -> ServerState:
        """Start the server with these settings; `None` for those of before."""
        port = None if self._config is None else self._config.port
        asked = {
            "api_key": f"art-{secrets.token_urlsafe(24)}", "config": config,
            "port": 0 if port == ServerConfig().port else port,
        }  # fmt: skip
        state = _state(await self._keeper_command("start", asked))
        if state.failure:
            raise await self.start_failure(state)
        return state

    async def start_failure(self, state: ServerState | None) -> MachineError:
        """Return the error for a server that ended, with what it printed since its last start."""
        if state is None:
            return MachineError(f"art-server does not start on {self.ssh.name}: its folder is gone")
        log = await self.log_tail(since=state.log_start)
        return MachineError(f"art-server does not start on {self.ssh.name}: {state.failure}\n{log}".rstrip())

    async def status(self) -> ServerState | None:
        """Return the state of the server; `None` if nothing is installed in its folder."""
        try:
            return _state(await self._keeper_command("status"))
        except _NothingInstalledError:
            return None

    async def stop(self) -> None:
        """Stop the server, and wait until all its processes have ended. Jobs go on when it is started again.

        Raises:
            MachineError: it does not end.
        """
        if (state := await self.status()) is not None and state.is_running:
            await self._keeper_command("stop")

    async def remove(self, *, delete_data: bool = False) -> bool:
        """Stop the server and delete its environment, key, settings and logs.

        Args:
            delete_data: whether to delete its data directory too, with all models, checkpoints and logs.

        Returns:
            whether there is data that stays.

        Raises:
            MachineError: something cannot be deleted.
        """
        await self.stop()
        folder = shell_path(self.folder)
        which = "" if delete_data else "! -name data"
        script = (
            f"cd {folder} 2>/dev/null || exit 0\n[ -e keeper.py ] || [ -d data ] || exit 0\n"
            f"find . -mindepth 1 -maxdepth 1 {which} -exec rm -rf {{}} + || exit 1\n"
            f"cd / && rmdir {folder} 2>/dev/null\n[ -d {folder}/data ] && echo data stays\nexit 0\n"
        )
        done = await self.command("sh -s", input=script.encode(), timeout_s=600)
        if done.rc != 0:  # a login shell may print something even if all went well
            raise MachineError(f"{self.ssh.name}: deleting {self.folder} failed: {done.stderr.strip()[-500:]}")
        return "data stays" in done.stdout.splitlines()

    async def log_tail(self, num_lines: int = 30, *, since: int = 0) -> str:
        """Return the last lines of the server's log, at most those after the first `since` bytes."""
        done = await self.command(f"tail -c +{since + 1} {shell_path(self.folder)}/server.log | tail -n {num_lines}")
        return done.stdout

    async def _keeper_command(
        self, command: str, asked: dict[str, Any] | None = None, *, python: str = "",
        timeout_s: float = COMMAND_TIMEOUT_S, on_line: Progress | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        folder = shell_path(self.folder)
        interpreter = shell_path(python) if python else f"{folder}/venv/bin/python"
        done = await self.command(
            f"{interpreter} {folder}/keeper.py {command}", input=json.dumps(asked or {}).encode(), timeout_s=timeout_s,
            on_line=on_line,
        )  # fmt: skip
        answer = answer_in(done.stdout)
        if answer is None:
            if done.rc in (126, 127) or re.search(r"No such file|can't open file", done.stderr):
                raise _NothingInstalledError(f"there is no ART in {self.folder} on {self.ssh.name}")
            errors = (done.stderr or done.stdout).strip()[-1500:]
            raise MachineError(f"{self.ssh.name}: `keeper.py {command}` failed with status {done.rc}: {errors}")
        if "error" in answer:
            raise MachineError(f"{self.ssh.name}: {answer['error']}")
        return answer

    async def command(
        self, command: str, *, input: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S, on_line: Progress | None = None
    ) -> Completed:
        """Run a command that may be repeated on the server's machine, again if the connection breaks.

        Raises:
            UnreachableError, MachineError: as for `Ssh.run`.
        """
        deadline = time.monotonic() + timeout_s
        num_tries = 0
        while True:
            num_tries += 1
            try:
                left_s = max(deadline - time.monotonic(), 1.0)
                return await self.ssh.run(command, input=input, timeout_s=left_s, on_line=on_line)
            except UnreachableError:
                if num_tries == NUM_TRIES or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_DELAY_S)

    @property
    def _joins(self) -> FurtherMachines | None:
        """The further machines, if any were named."""
        return self.nodes if self.nodes is not None and self.nodes.named else None

    def _config_values(self) -> dict[str, Any] | None:
        if self._config is None:
            return None
        values: dict[str, Any] = self._config.model_dump(mode="json", exclude_unset=True, exclude={"host", "port"})
        return values


class _NothingInstalledError(MachineError):
    """There is no keeper or no environment in the server's folder."""


def answer_in(printed: str) -> dict[str, Any] | None:
    """Return the answer of a program of ART's on the other machine; `None` if it gave none.

    The last line `answer {...}` counts, which may follow a greeting of the login shell on the same line.
    """
    answers = re.findall(r"answer (\{.*\})\s*$", printed, re.MULTILINE)
    return json.loads(answers[-1]) if answers else None


def _state(answer: dict[str, Any]) -> ServerState:
    names = ("is_running", "port", "server_pid", "num_starts", "last_exit", "failure", "config", "api_key")
    installed = answer["installed"]
    values = {name: answer[name] for name in names}
    values["log_start"] = answer.get("log_start", 0)  # an earlier installation does not say
    return ServerState(**values, version=installed.get("version", ""), digest=installed.get("digest", ""))


def _keeper() -> bytes:
    return importlib.resources.files("art.backends.ssh").joinpath("keeper.py").read_bytes()


def _silent(_: str) -> None:
    pass
