"""`art launch`: start an ART server on another machine, and look after it.

    art launch --gpu H100:1 --idle 30m      on a machine that SkyPilot rents
    art launch --cloud ssh --host alice@gpu-box --gpu --model qwen-2.5-7b
    art launch status
    art launch tunnel gpu-box     makes it reachable here; keep it running
    art launch logs gpu-box
    art launch stop gpu-box       its data stays; the next launch continues
    art launch down gpu-box --delete-data

A machine is reached by ssh only; no port of it is opened to a network. What was launched is recorded in
~/.art/launched (or ART_LAUNCHED_DIR).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.cli.output import duration, print_table, run_coroutine
from art.config import ServerConfig
from art.errors import ArtError, ConfigError, NotFoundError, StorageError
from art.storage.atomic import storage_errors, temporary_name
from art_cloud.skypilot_backend import SkyConfig, SkyPilotBackend
from art_cloud.ssh import Ssh, free_port, shell_path
from art_cloud.ssh_backend import Install, SshBackend

_COLUMNS = ("name", "kind", "machine", "state", "version", "launched", "data")
_SSH_OPTIONS = ("host", "ssh_config")
_SKY_OPTIONS = ("region", "spot", "idle_minutes", "volume")
"""Fields of `SkyConfig` that are options here; `SkyPilotBackend(config=...)` takes all."""
_NAMED = {
    "status": "show the servers that were launched here, or one of them",
    "logs": "print the last lines of a server's log",
    "tunnel": "make a server reachable on this machine until Ctrl-C, and start it again whenever it dies",
    "stop": "stop a server; its data stays where it is",
    "down": "stop a server and delete its environment, key and settings; the record here stays as long as its data",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cloud", help="where: ssh for a machine that exists, or a cloud of SkyPilot's: aws, gcp, kubernetes ... "
        "(default: what the other options mean)",
    )  # fmt: skip
    parser.add_argument(
        "--name", help="name of the record here, and of the server among those of the account (default: art for a "
        "rented machine; with ssh the record is named like the machine, and the server is in ~/.art/servers/default)",
    )  # fmt: skip
    parser.add_argument("--model", action="append", dest="models", metavar="MODEL", help="base model to load first")
    parser.add_argument(
        "--gpu", nargs="?", const=True, help="do not start without a CUDA device; with a value: rent such a machine"
    )
    parser.add_argument("--source", help="what to install: index, a folder of ART's source (default: what runs here)")
    parser.add_argument("--extra", action="append", dest="extras", help="part of ART to install (default: local)")
    parser.add_argument("--python", default="python3", help="which Python there, 3.11 or newer (default: python3)")
    parser.add_argument("--folder", help="folder of the server there (default: ~/.art/servers/NAME, or .../default)")
    ssh = parser.add_argument_group("machines reached by ssh (--cloud ssh)")
    ssh.add_argument("--host", metavar="[USER@]MACHINE", help="the machine, or an alias of ~/.ssh/config")
    ssh.add_argument("--ssh-config", metavar="FILE", help="configuration in place of ~/.ssh/config")
    sky = parser.add_argument_group("machines that SkyPilot rents (--gpu H100:1)")
    sky.add_argument("--region", help="region of the cloud, or context of Kubernetes")
    sky.add_argument("--spot", action="store_true", help="a cheaper machine that its cloud may take away")
    sky.add_argument(
        "--idle", type=lambda text: duration(text) // 60, dest="idle_minutes", metavar="TIME",
        help="how long without rollouts and jobs until it goes (default: 30m)",
    )  # fmt: skip
    sky.add_argument("--volume", help="volume of SkyPilot that holds the data and outlives the machine")
    sky.add_argument("--dry-run", action="store_true", help="print the task file for `sky launch`, and rent nothing")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, summary in _NAMED.items():
        action = actions.add_parser(name, help=summary)
        action.add_argument("server", nargs="?", help="name of its record (default: the only one)")
        if name == "logs":
            action.add_argument("--lines", type=int, default=50, help="number of lines (default: 50)")
        if name == "down":
            action.add_argument("--delete-data", action="store_true", help="delete its models and checkpoints too")


def run(args: argparse.Namespace) -> int:
    launched = Launched()
    if args.action is None:
        return run_coroutine(launch(launched, args))
    if args.action == "status":
        return run_coroutine(show_status(launched, args.server))
    act = {"logs": logs, "tunnel": tunnel, "stop": stop, "down": down}[args.action]
    return run_coroutine(act(launched, launched.find(args.server), args))


async def launch(launched: Launched, args: argparse.Namespace) -> int:
    """Install and start a server, record it, and print how to use it."""
    backend = new_backend(args)
    if isinstance(backend, SkyPilotBackend) and args.dry_run:
        print(backend.task(), end="")
        return 0
    async with backend:
        record = new_record(args, backend)
        is_new = record.name not in launched.names()
        if is_new:  # before anything is rented or installed, so that a failed launch can be taken down
            if not isinstance(backend, SkyPilotBackend):
                await backend.server_status()  # raises if the machine does not let us in
            launched.save(record, "")
        try:
            client = await backend.open()
        except ArtError:
            if is_new:
                _note(f"`art launch down {record.name}` removes what this launch leaves on {backend.ssh.host}")
            raise
        assert client.api_key is not None
        launched.save(record, client.api_key)
    print(f"# Make it reachable here, and keep this running:\n    art launch tunnel {record.name}")
    _print_use(launched, record)
    return 0


def _print_use(launched: Launched, record: LaunchRecord) -> None:
    print(
        "# In another terminal, for scripts with `RemoteBackend`, `art checkpoints`, `art status` and others:\n"
        f"    export ART_SERVER_URL={record.url}\n"
        f"    export ART_API_KEY=$(cat {shlex.quote(str(launched.key_path(record.name)))})",
        flush=True,
    )


async def show_status(launched: Launched, name: str | None) -> int:
    """Print a table of the servers. The machines are asked at once."""
    records = [launched.find(name)] if name is not None else [launched.find(each) for each in launched.names()]
    if not records:
        print(f"no server was launched, as far as {launched.folder} knows")
        return 0
    print_table([_COLUMNS, *await asyncio.gather(*map(_row, records))])
    return 0


async def _row(record: LaunchRecord) -> tuple[str, ...]:
    backend, version, words = backend_of(record), "-", ""
    try:
        is_up = True
        if isinstance(backend, SkyPilotBackend):
            is_up, words = await backend.describe()
        if is_up:
            state = await backend.server_status()
            server = "nothing installed" if state is None else "running" if state.is_running else "stopped"
            words = f"{server}; {words}" if words else server
            if state is not None:
                words += f" ({state.failure.splitlines()[0]})" if state.failure else ""
                version = state.version
    except ArtError as error:
        words = f"unknown: {error.message.splitlines()[0]}"
    launched_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.launched_at))
    return record.name, record.kind, backend.ssh.host, words, version, launched_at, backend.server_data_dir


async def logs(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    """Print the last lines of a server's log."""
    backend = backend_of(record)
    done = await backend.ssh.run(f"tail -n {args.lines} {shell_path(backend.server_data_dir)}/logs/server.log")
    print(done.stdout + done.stderr, end="")
    return done.returncode


async def tunnel(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    """Hold a tunnel open, and the server running, until Ctrl-C."""
    async with backend_of(record) as backend:
        client = await backend.open()
        assert client.api_key is not None
        launched.save(record, client.api_key)
        print(f"{record.name} is reachable at {record.url} until Ctrl-C")
        _print_use(launched, record)
        await asyncio.Event().wait()
    return 0


async def stop(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    backend = backend_of(record)
    await backend.stop()
    _note(f"{record.name} is stopped; its data stays in {backend.server_data_dir} on {backend.ssh.host}")
    return 0


async def down(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    backend = backend_of(record)
    if await backend.down(delete_data=args.delete_data):
        kept = (
            f"; its data stays in {backend.kept_data}. `art launch down {record.name} --delete-data` deletes it, with "
            "the record here"
        )
    else:
        launched.forget(record.name)
        kept = ""
    _note(f"{record.name} is down{kept}")
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def new_backend(args: argparse.Namespace) -> SshBackend:
    """Make the backend for a launch; it is not opened.

    Raises:
        ConfigError: the options name no kind of machine, or one that only another kind has.
    """
    settings: dict[str, Any] = {name: value for name in ("models", "gpu") if (value := getattr(args, name))}
    install = Install(
        source=args.source, extras=tuple(args.extras or ("local",)), python=args.python, folder=args.folder
    )  # fmt: skip
    if args.cloud == "ssh" or (args.cloud is None and args.host is not None):
        _refuse_options((*_SKY_OPTIONS, "dry_run"), "SkyPilot rents", args)
        if args.host is None:
            raise ConfigError("--cloud ssh needs a machine: --host USER@MACHINE")
        if isinstance(args.gpu, str):
            raise ConfigError(
                f"--gpu takes no value with --cloud ssh: the machine has the GPUs that it has; got {args.gpu!r}"
            )
        server_config = ServerConfig.model_validate(settings) if settings else None
        ssh = Ssh(args.host, config=args.ssh_config)
        return SshBackend(ssh, name=args.name or "default", install=install, server_config=server_config)
    if args.cloud is None and args.gpu is None:
        raise ConfigError(
            "nothing says where; try `art launch --gpu H100:1`, or `art launch --cloud ssh --host USER@MACHINE`"
        )
    _refuse_options(_SSH_OPTIONS, "ssh reaches", args)
    if args.gpu is True:
        raise ConfigError("--gpu needs the kind and number of GPUs to rent, such as --gpu H100:1")
    fields = {name: value for name in _SKY_OPTIONS if (value := getattr(args, name)) is not None}
    settings |= {"gpu": True} if args.gpu else {}
    return SkyPilotBackend(
        cluster=args.name or "art", config=SkyConfig(gpu=args.gpu, cloud=args.cloud, **fields), install=install,
        server_config=ServerConfig.model_validate(settings) if settings else None,
    )  # fmt: skip


def _refuse_options(options: tuple[str, ...], whose: str, args: argparse.Namespace) -> None:
    """Refuse options that only the other kind of machine has, rather than ignore them."""
    for option in options:
        if getattr(args, option) not in (None, False):
            name = option.removesuffix("_minutes").replace("_", "-")
            raise ConfigError(f"--{name} is for machines that {whose}")


def new_record(args: argparse.Namespace, backend: SshBackend) -> LaunchRecord:
    """Make the record of a launch."""
    if backend.local_port is None:
        backend.local_port = free_port()
    host = backend.ssh.host
    record = LaunchRecord(
        name=args.name or re.sub(r"[^A-Za-z0-9_-]+", "-", host.rpartition("@")[2]).strip("-_")[:64] or "default",
        host=host, ssh_config=str(backend.ssh.config) if backend.ssh.config else None, folder=backend.server_folder,
        local_port=backend.local_port,
    )  # fmt: skip
    if not isinstance(backend, SkyPilotBackend):
        return record
    rented = {"kind": "skypilot", "name": backend.cluster, "config": dataclasses.asdict(backend.config)}
    return record.model_copy(update=rented | {"server_config": backend.server_settings})


def backend_of(record: LaunchRecord) -> SshBackend:
    """Make the backend for a server that was launched. Where ART is there already, it installs nothing."""
    backend: SshBackend
    if record.kind == "skypilot":
        config = None if record.server_config is None else ServerConfig.model_validate(record.server_config)
        backend = SkyPilotBackend(
            cluster=record.name, config=SkyConfig(**record.config), install=Install("installed", folder=record.folder),
            server_config=config,
        )  # fmt: skip
    else:
        ssh = Ssh(record.host, config=record.ssh_config and Path(record.ssh_config))
        backend = SshBackend(ssh, install=Install("installed", folder=record.folder))
    backend.local_port = record.local_port
    return backend


FOLDER_VARIABLE = "ART_LAUNCHED_DIR"


class LaunchRecord(BaseModel):
    """One server that was launched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Name by which `art launch` finds it."""
    kind: Literal["ssh", "skypilot"] = "ssh"
    """Whether its machine existed, or is rented by SkyPilot."""
    host: str
    ssh_config: str | None = None
    folder: str
    """Folder of the server on its machine."""
    local_port: int
    """Port of this machine for the tunnel, so that the address of the server here stays the same."""
    launched_at: float = Field(default_factory=time.time)
    """Seconds since 1970."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of `SkyConfig` for a rented machine."""
    server_config: dict[str, Any] | None = None
    """Settings of the server of a rented machine, which may have to be launched again."""

    @property
    def url(self) -> str:
        """Address of the server on this machine while a tunnel is open."""
        return f"http://127.0.0.1:{self.local_port}"


class Launched:
    """The records of one user: one file for each server, and its API key in another.

    NAME.json        where the server is and how it is reached; no secret
    NAME.key         its API key; both files are readable for their owner only
    """

    def __init__(self, folder: Path | None = None) -> None:
        """
        Args:
            folder: by default that of ART_LAUNCHED_DIR, or `~/.art/launched`.

        Raises:
            ConfigError: there is no home directory, and no folder is named.
        """
        named = os.environ.get(FOLDER_VARIABLE)
        try:
            self.folder = folder or Path(named or "~/.art/launched").expanduser()
        except RuntimeError as error:
            raise ConfigError(
                f"this user has no home directory for the records of launched servers; name a folder in "
                f"{FOLDER_VARIABLE}, or set HOME"
            ) from error

    def key_path(self, name: str) -> Path:
        """Path of the file with the API key of a server."""
        return self.folder / f"{_checked(name)}.key"

    def save(self, record: LaunchRecord, api_key: str) -> None:
        """Write a record and its key, in the place of earlier ones of this name.

        Raises:
            StorageError: they cannot be written.
        """
        with storage_errors(self.folder, "making"):
            for folder in (*reversed(self.folder.parents), self.folder):
                if not folder.exists():
                    folder.mkdir(exist_ok=True, mode=0o700)
        _write_private(self.key_path(record.name), api_key)
        _write_private(self._path(record.name), record.model_dump_json(indent=2) + "\n")

    def find(self, name: str | None = None) -> LaunchRecord:
        """Return the record of a name. Without a name there must be exactly one record.

        Raises:
            NotFoundError: there is no such record, or no record at all.
            ConfigError: no name is given, and there are several records.
            StorageError: the record cannot be read.
        """
        if name is None:
            names = self.names()
            if len(names) > 1:
                raise ConfigError(f"several servers are launched; name one of them: {', '.join(names)}")
            if not names:
                raise NotFoundError(f"{self.folder} has no record of a server; start one with `art launch`")
            name = names[0]
        path = self._path(name)
        with storage_errors(path, "reading"):
            content = path.read_bytes() if path.exists() else None
        if content is None:
            there = ", ".join(self.names()) or "none"
            raise NotFoundError(f"no server {name!r} is launched; in {self.folder} there are: {there}")
        try:
            return LaunchRecord.model_validate_json(content)
        except ValidationError as error:
            raise StorageError(f"{path} is damaged or of another version of ART: {error}") from error

    def names(self) -> list[str]:
        """The names of all records, in alphabetical order."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def forget(self, name: str) -> None:
        """Delete a record and its key, if they exist.

        Raises:
            StorageError: they cannot be deleted.
        """
        for path in (self._path(name), self.key_path(name)):
            with storage_errors(path, "deleting"):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{_checked(name)}.json"


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise ConfigError(f"a server's name has letters, digits, - and _ only, got {name!r}", param="name")
    return name


def _write_private(path: Path, content: str) -> None:
    """Replace a file at once; it is never readable for others."""
    temporary = temporary_name(path)
    with storage_errors(path, "writing"):
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
