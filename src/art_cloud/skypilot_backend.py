"""`SkyPilotBackend`: an ART server on a machine that SkyPilot rents, used from here.

cluster up, and its job still runs? -> sky launch (task file) -> data back -> as `SshBackend`: ART, art-server, tunnel
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from art.backoff import retry
from art.client.terminal import ProgressLine
from art.config import ServerConfig
from art.errors import ConfigError, MachineError, UnreachableError
from art_cloud.ssh import SHOWN_STDERR, Ssh, run_process, shell_path
from art_cloud.ssh_backend import Install, SshBackend, say

EXECUTABLE_VARIABLE = "ART_SKY"
MIN_VERSION = (0, 14)
"""The first release with which this part was tried."""
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
    """SkyPilot's program, that of ART_SKY or else `sky` on PATH, which is looked for when it is first needed.

    It is used as a program from an environment of its own, since the versions that it needs fight those of others.
    """

    def __init__(self) -> None:
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
            if ran.returncode != 0 or version is None:
                raise ConfigError(f"{path} is not SkyPilot's program: `{path} --version` gave {ran.stdout[-300:]!r}")
            if (int(version[1]), int(version[2])) < MIN_VERSION:
                oldest = ".".join(map(str, MIN_VERSION))
                raise ConfigError(f"{path} is SkyPilot {version[1]}.{version[2]}{version[3]}, and ART needs {oldest}")
            self._found = path
        return self._found

    def _locate(self) -> str:
        named = os.environ.get(EXECUTABLE_VARIABLE) or "sky"
        path = shutil.which(str(Path(named).expanduser()))
        if path is None:
            raise ConfigError(
                f"there is no program {named!r}: SkyPilot finds and rents the machines. `uv tool install "
                f"'skypilot[aws]'` installs it for AWS; or name its program `sky` in {EXECUTABLE_VARIABLE}"
            )
        return os.path.abspath(path)  # it runs in another folder

    @retry(NUM_TRIES, delay=RETRY_DELAY_S, backoff_factor=1.0, exceptions=(UnreachableError,))
    async def run(self, *arguments: str, timeout_s: float = QUESTION_TIMEOUT_S) -> str:
        """Run `sky` in its own folder until it has given an answer, and return what it printed, without colours.

        In the caller's folder, a script of the name `sky.py` would be imported in place of SkyPilot.

        Args:
            arguments: paths among them are absolute.

        Raises:
            ConfigError: there is no usable `sky`.
            MachineError: SkyPilot refuses or fails; the message says why in its own words.
            UnreachableError: it gave no answer in time, again and again.
        """
        ran = await _run([await self.find(), *arguments], timeout_s)
        text = f"{ran.stdout}\n{ran.stderr}".strip()
        if ran.returncode < 0 or (ran.returncode > 0 and _NO_ANSWER.search(text)):
            raise UnreachableError(
                f"SkyPilot's own server does not answer `sky {arguments[0]}`; `sky api info` says where it is "
                f"expected, `sky api start` starts it. SkyPilot said:\n{text[-SHOWN_CHARACTERS:]}"
            )
        # `sky stop` and `sky down` exit with 0 even if they fail.
        if ran.returncode != 0 or "Cluster(s) failed" in text:
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


async def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    ran = await run_process(command, timeout_s=timeout_s, cwd=os.path.dirname(command[0]))
    ran.stdout, ran.stderr = _COLOUR.sub("", ran.stdout), _COLOUR.sub("", ran.stderr)
    return ran


SKY_IDLE_MINUTES = 5
"""Longest time that SkyPilot itself waits after ART's job on the machine has ended."""
VOLUME_PATH = "/art-volume"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyConfig:
    """The machine that SkyPilot is asked for, and when it goes."""

    gpu: str | None = None
    """Kind and number of GPUs, such as `H100:1`, with SkyPilot's names (`sky gpus list`). `None`: no GPU."""
    cloud: str | None = None
    """A cloud by SkyPilot's name: `aws`, `gcp`, `kubernetes`, `runpod` ... By default the cheapest that is set up."""
    region: str | None = None
    """Region of that cloud, or context of Kubernetes."""
    spot: bool = False
    """Whether to take a machine that is cheaper, and that its cloud may take away at any time."""
    idle_minutes: int = 30
    """Minutes without rollouts and jobs after which the machine goes, whether or not a client is connected."""
    on_idle: Literal["stop", "down"] | None = None
    """What becomes of an idle machine: stopped with its disk kept, which costs a little, or deleted. `None`: deleted if
    its data is on a volume or it is a spot machine, which cannot be stopped; stopped otherwise."""
    volume: str | None = None
    """SkyPilot volume (`sky volumes`) for the server and its data, which outlives the machine."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of SkyPilot's `resources`, such as `{"disk_size": 500, "image_id": "docker:a/b"}`."""
    ssh_config: str | None = None
    """Configuration file of ssh in place of `~/.ssh/config`, into which SkyPilot writes the names of its machines."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is impossible; the message names it.
        """
        if self.gpu is not None and not re.fullmatch(r"[A-Za-z0-9._-]+(:[0-9]+)?", self.gpu):
            raise ConfigError(f'gpu is a kind and a number, such as "H100:1"; got {self.gpu!r}', param="gpu")
        if self.region is not None and self.cloud is None:
            raise ConfigError(f"region={self.region!r} needs its cloud", param="region")
        if self.idle_minutes < 2:
            raise ConfigError(f"idle_minutes must be 2 or more, got {self.idle_minutes}", param="idle_minutes")
        if self.on_idle not in ("down", "stop", None):
            raise ConfigError(f'on_idle is "down" or "stop", got {self.on_idle!r}', param="on_idle")
        if "ports" in self.resources:
            raise ConfigError("resources.ports would open the machine to the internet; ART uses an ssh tunnel only")
        if "autostop" in self.resources:
            raise ConfigError("resources.autostop is set by idle_minutes and on_idle of SkyConfig", param="resources")

    def task(self, cluster: str, folder: str) -> dict[str, Any]:
        """Make the content of the task file: what is rented, and a job that ends when the server is of no more use.

        The server itself is installed and started over ssh, as on any other machine, so its key is in no file or
        command of SkyPilot.

        Args:
            folder: folder of the server on the machine.
        """
        sky_minutes = min(SKY_IDLE_MINUTES, self.idle_minutes // 2)
        deletes = (self.on_idle or ("down" if self.volume or self.spot else "stop")) == "down"
        resources = {
            "infra": self.cloud and self.cloud + (f"/{self.region}" if self.region else ""),
            "accelerators": self.gpu and (self.gpu if ":" in self.gpu else f"{self.gpu}:1"),
            "use_spot": self.spot or None, **self.resources,
            "autostop": {"idle_minutes": sky_minutes, "down": deletes, "wait_for": "jobs_and_ssh"},
        }  # fmt: skip
        task: dict[str, Any] = {"name": cluster, "num_nodes": 1}
        task["resources"] = {name: value for name, value in resources.items() if value is not None}
        if self.volume is not None:
            task["volumes"] = {VOLUME_PATH: self.volume}
        minutes = self.idle_minutes - sky_minutes
        task["run"] = (
            f"# Ends {minutes} minutes after the server's last answer or progress of a job; then SkyPilot counts.\n"
            f"{self.make_folder(folder)}; cd {shell_path(folder)}; touch data\n"
            f'while [ -n "$(find data -maxdepth 1 -mmin -{minutes} 2> /dev/null)" ]; do touch in-use; sleep 15; done\n'
            "rm -f in-use\n"
        )
        return task

    def make_folder(self, folder: str) -> str:
        """A command for the shell of the machine that makes the folder of the server, and of its data."""
        own = f"[ -w {VOLUME_PATH} ] || sudo chown $(id -u) {VOLUME_PATH}; " if self.volume is not None else ""
        return f"{own}mkdir -p {shell_path(folder)}/data"


class SkyPilotBackend(SshBackend):
    """Trains and serves on a machine that SkyPilot finds, rents and gives back, in any cloud that it knows.

    The first use launches the machine, installs ART there, starts `art-server` on the machine's loopback, and opens an
    ssh tunnel to it. Closing the backend leaves the machine to its jobs; it goes when it has been idle for
    `idle_minutes`. The next backend with the same cluster name finds it, or starts or launches it again.
    """

    def __init__(
        self,
        gpu: str | None = None,
        *,
        cluster: str = "art",
        idle_minutes: int | None = None,
        config: SkyConfig | None = None,
        install: Install | None = None,
        server_config: ServerConfig | None = None,
    ) -> None:
        """
        Args:
            gpu: kind and number of GPUs, such as `H100:1`; the same as in `config`.
            cluster: name of the machine among SkyPilot's clusters, and of its server.
            idle_minutes: minutes without rollouts and jobs after which the machine goes; the same as in `config`.
            config: the machine, and when it goes.
            install: what is installed; by default what this process runs, with the extra `local`.
            server_config: settings of the server; by default it does not start without a GPU if one is rented.

        Raises:
            ConfigError: a name or a setting is malformed, or settings contradict each other.
        """
        if not re.fullmatch(r"[a-zA-Z]([a-zA-Z0-9_-]{0,30}[a-zA-Z0-9])?", cluster):
            raise ConfigError(
                f"a cluster's name has up to 32 letters, digits, - and _, and begins with a letter; got {cluster!r}",
                param="cluster",
            )
        changes: dict[str, Any] = {"gpu": gpu, "idle_minutes": idle_minutes}
        changes = {name: value for name, value in changes.items() if value is not None}
        self.config = dataclasses.replace(config or SkyConfig(), **changes)
        install = install or Install()
        if install.folder is None:
            install = dataclasses.replace(
                install, folder=f"{VOLUME_PATH if self.config.volume else '~/.art/servers'}/{cluster}"
            )
        if server_config is None and self.config.gpu is not None:
            server_config = ServerConfig(gpu=True)
        super().__init__(
            Ssh(cluster, config=self.config.ssh_config), name=cluster, install=install, server_config=server_config
        )
        self.cluster = cluster
        self.environment: dict[str, str] = {}
        """Variables of the server on the machine, such as HF_TOKEN. Set them before the first use."""
        self._sky = Sky()
        self._home_copy = Path("~/.art/clusters").expanduser() / cluster

    @classmethod
    async def initialize_cluster(
        cls,
        *,
        cluster_name: str = "art",
        gpu: str | None = None,
        resources: Any = None,
        art_version: str | None = None,
        env_path: str | Path | None = None,
        force_restart: bool = False,
    ) -> Self:
        """Make a backend as older code does, and launch its machine now.

        Args:
            gpu: kind and number of GPUs; it wins over that of `resources`.
            resources: fields of SkyPilot's resources by name, or a `sky.Resources`. Ports are not opened.
            art_version: a version of ART to install, or a folder of its source. By default what this process runs.
            env_path: a file of lines `NAME=value`, which become variables of the server.
            force_restart: stop a server that runs there first, so that it gets new settings and variables.

        Raises:
            ConfigError: neither `gpu` nor `resources` is given, or one of them is impossible.
            MachineError: no machine is free, or ART cannot be installed or started there.
        """
        if gpu is None and resources is None:
            raise ConfigError('initialize_cluster needs `gpu`, such as "H100:1", or `resources`', param="gpu")
        fields = resources.to_yaml_config() if hasattr(resources, "to_yaml_config") else resources or {}
        if not isinstance(fields, dict):
            raise ConfigError(f"resources are fields by name, or a sky.Resources; got {resources!r}", param="resources")
        fields = {name: value for name, value in fields.items() if value is not None and name != "ports"}
        if gpu is not None:
            fields.pop("accelerators", None)
        source: str | Path | None = art_version
        if art_version is not None and re.fullmatch(r"\d+(\.\w+)+", art_version):
            source = f"agent-reinforcement-trainer[local]=={art_version}"
        backend = cls(gpu, cluster=cluster_name, config=SkyConfig(resources=fields), install=Install(source=source))
        if env_path is not None:
            backend.environment = _read_environment(Path(env_path))
        if force_restart and await backend.is_up():
            await backend.stop_server()
        await backend.open()
        return backend

    def task(self) -> str:
        """Return the content of the task file for SkyPilot, as JSON, which YAML contains."""
        return json.dumps(self.config.task(self.cluster, self.server_folder), indent=2) + "\n"

    async def is_up(self) -> bool:
        """Whether the cloud says that the machine runs now."""
        is_up, _ = await self.describe()
        return is_up

    async def _find_machine(self) -> None:
        """Find the machine, or start or launch it.

        Raises:
            ConfigError: there is no usable `sky`.
            MachineError: no machine is free, or SkyPilot refuses what was asked for.
        """
        in_use = f"find {shell_path(self.server_folder)}/in-use -mmin -1 2> /dev/null | grep -q ."
        if not await self.is_up() or (await self.ssh.run(in_use)).returncode != 0:
            say(f"{self.cluster}: launching (minutes)")
            with tempfile.NamedTemporaryFile("w", suffix=".sky.yaml") as file:
                file.write(self.task())
                file.flush()
                with ProgressLine(f"{self.cluster}: launching"):
                    await self._sky.run(
                        "launch", "--cluster", self.cluster, "--yes", "--detach-run", file.name,
                        timeout_s=CHANGE_TIMEOUT_S,
                    )  # fmt: skip
            if not await self.is_up():
                raise MachineError(f"SkyPilot launched {self.cluster!r}, and it is gone again; see `sky status`")
        await self.ssh.run(self.config.make_folder(self.server_folder))
        if self._home_copy.exists() and not await self._has_data():
            say(f"{self.cluster}: its data comes back from {self._home_copy}")
            with ProgressLine(f"{self.cluster}: copying"):
                await self._copy(f"{self._home_copy}/", self._remote_data())
        if self.environment:
            lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.environment.items())
            write = f"umask 077; cat > {shell_path(self.server_folder)}/environment.sh"
            await self.ssh.run(write, input=lines.encode())

    async def stop(self) -> None:
        """Stop the server, then the machine. Its disk stays, and costs a little; the next use goes on with it.

        Raises:
            MachineError: the server does not end, or its cloud cannot stop this machine.
        """
        if await self.is_up():
            await super().stop()
        await self.close()
        await self._sky.run("stop", "--yes", self.cluster, timeout_s=CHANGE_TIMEOUT_S)

    async def down(self, *, delete_data: bool = False) -> bool:
        """Stop the server, copy its data here unless it is on a volume, and delete the machine with its disk.

        A machine that is gone already is no error.

        Args:
            delete_data: copy nothing, and delete the copy that is here too. A volume is left alone.

        Returns:
            whether there is data that stays.

        Raises:
            MachineError: the data could not be copied, so the machine goes on; or it could not be deleted.
        """
        await self.close()
        if not delete_data and await self.is_up() and await self._has_data():
            await self.stop_server()  # a database that is copied while it is written is damaged
            if self.config.volume is None:
                say(f"{self.cluster}: copying its data to {self._home_copy}")
                self._home_copy.mkdir(parents=True, exist_ok=True)
                with ProgressLine(f"{self.cluster}: copying"):
                    await self._copy(self._remote_data(), f"{self._home_copy}/")
        say(f"{self.cluster}: deleting the machine")
        with ProgressLine(f"{self.cluster}: deleting"):
            await self._sky.run("down", "--yes", self.cluster, timeout_s=CHANGE_TIMEOUT_S)
        if await self._sky.status(self.cluster) is not None:
            raise MachineError(f"the cluster {self.cluster!r} is not gone, and costs money; try `sky down` yourself")
        if delete_data:
            shutil.rmtree(self._home_copy, ignore_errors=True)
        return not delete_data and (self.config.volume is not None or self._home_copy.exists())

    @property
    def kept_data(self) -> str:
        """Where the data directory is after `down`, in words."""
        return f"the volume {self.config.volume}" if self.config.volume else str(self._home_copy)

    async def describe(self) -> tuple[bool, str]:
        """Return whether the machine is up, and in words what it is."""
        row = await self._sky.status(self.cluster)
        if row is None:
            return False, "no machine"
        words = (row.get("status"), "on", row.get("cloud"), row.get("region"), row.get("resources_str"))
        return row.get("status") == "UP", " ".join(str(word) for word in words if word)

    async def _has_data(self) -> bool:
        """Whether a server has worked in the data directory."""
        done = await self.ssh.run(f"test -e {shell_path(self.server_data_dir)}/art.db")
        return done.returncode == 0

    def _remote_data(self) -> str:
        return f"{self.cluster}:{self.server_data_dir.removeprefix('~/')}/"

    async def _copy(self, source: str, target: str) -> None:
        """Copy a folder with rsync, which SkyPilot needs too. Links are not copied: they could lead anywhere here."""
        shell = shlex.join(self.ssh.base_command()[:-2])
        command = ["rsync", "--recursive", "--times", "--delete", "--partial", "--rsh", shell, source, target]
        try:
            done = await run_process(command, timeout_s=CHANGE_TIMEOUT_S)
        except FileNotFoundError as error:
            raise ConfigError("there is no `rsync` program, which copies the data; install it") from error
        if done.returncode != 0:
            raise MachineError(f"copying {source} to {target} failed: {done.stderr[-SHOWN_STDERR:]}")


def _read_environment(path: Path) -> dict[str, str]:
    """Read a file of lines `NAME=value`, as `env_path` of older code names it.

    Raises:
        ConfigError: there is no such file, or a line is none of these.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"env_path: cannot read {path}: {error}", param="env_path") from error
    values: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        for word in shlex.split(line, comments=True):
            name, is_value, value = word.partition("=")
            if name != "export" and not (is_value and name.isidentifier()):
                raise ConfigError(f"env_path: line {number} of {path} is not NAME=value", param="env_path")
            values |= {name: value} if is_value else {}
    return values
