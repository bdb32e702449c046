"""`SkyPilotBackend`: an ART server on a machine that SkyPilot rents, used from here.

cluster up, and its job still runs? -> sky launch (task file) -> data back -> as `SshBackend`: ART, art-server, tunnel
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

from art.backends.skypilot.sky import CHANGE_TIMEOUT_S, Sky
from art.backends.skypilot.sky_config import VOLUME_PATH, SkyConfig, write_yaml
from art.backends.ssh.remote_server import Install
from art.backends.ssh.ssh import SHOWN_STDERR, Ssh, run_process, shell_path
from art.backends.ssh.ssh_backend import SshBackend
from art.config import ServerConfig
from art.errors import ConfigError, MachineError

COMMAND_TIMEOUT_S = 60.0


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
        self._sky = Sky(self.config.sky)
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
            await backend.server.stop()
        await backend.open()
        return backend

    def task(self) -> str:
        """Return the content of the task file for SkyPilot, as YAML."""
        return write_yaml(self.config.task(self.cluster, self.server.folder))

    async def is_up(self) -> bool:
        """Whether the cloud says that the machine runs now."""
        row = await self._sky.status(self.cluster)
        return row is not None and row.get("status") == "UP"

    async def _find_machine(self) -> None:
        """Find the machine, or start or launch it.

        Raises:
            ConfigError: there is no usable `sky`.
            MachineError: no machine is free, or SkyPilot refuses what was asked for.
        """
        in_use = f"find {shell_path(self.server.folder)}/in-use -mmin -1 2> /dev/null | grep -q ."
        if not await self.is_up() or (await self.server.command(in_use)).rc != 0:
            self._say(f"{self.cluster}: launching (minutes)")
            with tempfile.NamedTemporaryFile("w", suffix=".sky.yaml") as file:
                file.write(self.task())
                file.flush()
                await self._sky.run(
                    "launch", "--cluster", self.cluster, "--yes", "--detach-run", file.name,
                    timeout_s=CHANGE_TIMEOUT_S, on_line=lambda line: self._say(f"  sky: {line}"),
                )  # fmt: skip
            if not await self.is_up():
                raise MachineError(f"SkyPilot launched {self.cluster!r}, and it is gone again; see `sky status`")
        await self.server.command(self.config.make_folder(self.server.folder))
        if self._home_copy.exists() and not await self._has_data():
            self._say(f"{self.cluster}: its data comes back from {self._home_copy}")
            await self._copy(f"{self._home_copy}/", self._remote_data())
        if self.environment:
            await self.ssh.put(json.dumps(self.environment).encode(), f"{self.server.folder}/environment.json")

    async def stop(self) -> None:
        """Stop the server, then the machine. Its disk stays, and costs a little; the next use goes on with it.

        Raises:
            MachineError: the server does not end, or its cloud cannot stop this machine.
        """
        if await self.is_up():
            await super().stop()
        await self._disconnect()
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
        await self._disconnect()
        if not delete_data and await self.is_up() and await self._has_data():
            await self.server.stop()  # a database that is copied while it is written is damaged
            if self.config.volume is None:
                self._say(f"{self.cluster}: copying its data to {self._home_copy}")
                self._home_copy.mkdir(parents=True, exist_ok=True)
                await self._copy(self._remote_data(), f"{self._home_copy}/")
        self._say(f"{self.cluster}: deleting the machine")
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
        done = await self.server.command(f"test -e {shell_path(self.server.data_dir)}/art.db")
        return done.rc == 0

    def _remote_data(self) -> str:
        return f"{self.cluster}:{self.server.data_dir.removeprefix('~/')}/"

    async def _copy(self, source: str, target: str) -> None:
        """Copy a folder with rsync, which SkyPilot needs too. Links are not copied: they could lead anywhere here."""
        shell = shlex.join(self.ssh.base_command()[:-2])
        command = ["rsync", "--recursive", "--times", "--delete", "--partial", "--rsh", shell, source, target]
        try:
            done = await run_process(command, timeout_s=CHANGE_TIMEOUT_S)
        except FileNotFoundError as error:
            raise ConfigError("there is no `rsync` program, which copies the data; install it") from error
        if done.rc != 0:
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
    values = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*", line)
        if match is None:
            raise ConfigError(f"env_path: line {number} of {path} is not NAME=value", param="env_path")
        name, value = match.groups()
        is_quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        values[name] = value[1:-1] if is_quoted else value
    return values
