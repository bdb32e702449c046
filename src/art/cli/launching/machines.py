"""The two kinds of machines of `art launch`: one that exists and that ssh reaches, and one that SkyPilot rents."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from art.backends.skypilot.sky_config import SkyConfig
from art.backends.skypilot.skypilot_backend import SkyPilotBackend
from art.backends.ssh.remote_server import Install
from art.backends.ssh.ssh import Ssh
from art.backends.ssh.ssh_backend import SshBackend
from art.backends.ssh.tunnel import free_port
from art.cli.launching.launched import LaunchRecord
from art.config import ServerConfig
from art.errors import ConfigError

_MINUTES = {"m": 1, "h": 60, "d": 1440}
_SSH_OPTIONS = ("host", "ssh_config")
_SKY_OPTIONS = {
    "region": "region", "spot": "spot", "idle": "idle_minutes", "on_idle": "on_idle", "disk": "disk_gb",
    "image": "image", "volume": "volume", "sky": "sky", "dry_run": None,
}  # fmt: skip
"""Fields of `SkyConfig` by the options that only rented machines have."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only one of the kinds has."""
    ssh = parser.add_argument_group("machines reached by ssh (--cloud ssh)")
    ssh.add_argument("--host", metavar="[USER@]MACHINE", help="the machine, or an alias of ~/.ssh/config")
    ssh.add_argument("--ssh-config", metavar="FILE", help="configuration in place of ~/.ssh/config")
    sky = parser.add_argument_group("machines that SkyPilot rents (--gpu H100:1, or --cloud aws, gcp, kubernetes ...)")
    sky.add_argument("--region", help="region of the cloud, or context of Kubernetes")
    sky.add_argument("--spot", action="store_true", help="a cheaper machine that its cloud may take away")
    sky.add_argument(
        "--idle", type=idle_minutes, metavar="TIME",
        help="how long without rollouts and jobs until it goes (default: 30m)",
    )  # fmt: skip
    sky.add_argument(
        "--on-idle", choices=["stop", "down"],
        help="stop it when idle, or delete it (default: down for a spot machine or with a volume, else stop)",
    )  # fmt: skip
    sky.add_argument("--disk", type=int, metavar="GB", help="size of its disk (default: SkyPilot's)")
    sky.add_argument("--image", help="image of the machine, such as docker:owner/image:tag")
    sky.add_argument("--volume", help="SkyPilot volume that holds the data and outlives the machine")
    sky.add_argument("--sky", metavar="FILE", help="SkyPilot's program (default: ART_SKY, or sky on PATH)")
    sky.add_argument("--dry-run", action="store_true", help="print the task file for `sky launch`, and rent nothing")


def idle_minutes(text: str) -> int:
    """Read a time such as `30m`, `2h` or `45` (minutes)."""
    match = re.fullmatch(r"(\d+)([mhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30m or 2h, got {text!r}")
    return int(match[1]) * _MINUTES[match[2] or "m"]


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
        _refuse_options(_SKY_OPTIONS, "SkyPilot rents", args)
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
    fields = {field: getattr(args, option) for option, field in _SKY_OPTIONS.items() if field is not None}
    fields = {field: value for field, value in fields.items() if value is not None}
    settings |= {"gpu": True} if args.gpu else {}
    return SkyPilotBackend(
        cluster=args.name or "art", config=SkyConfig(gpu=args.gpu, cloud=args.cloud, **fields), install=install,
        server_config=ServerConfig.model_validate(settings) if settings else None,
    )  # fmt: skip


def _refuse_options(options: tuple[str, ...] | dict[str, str | None], whose: str, args: argparse.Namespace) -> None:
    """Refuse options that only the other kind has, rather than ignore them."""
    for option in options:
        if getattr(args, option) not in (None, False):
            raise ConfigError(f"--{option.replace('_', '-')} is for machines that {whose}")


def new_record(args: argparse.Namespace, backend: SshBackend) -> LaunchRecord:
    """Make the record of a launch."""
    if backend.local_port is None:
        backend.local_port = free_port()
    host = backend.ssh.host
    record = LaunchRecord(
        name=args.name or re.sub(r"[^A-Za-z0-9_-]+", "-", host.rpartition("@")[2]).strip("-_")[:64] or "default",
        host=host, ssh_config=str(backend.ssh.config) if backend.ssh.config else None, folder=backend.server.folder,
        local_port=backend.local_port,
    )  # fmt: skip
    if not isinstance(backend, SkyPilotBackend):
        return record
    rented = {"kind": "skypilot", "name": backend.cluster, "config": dataclasses.asdict(backend.config)}
    return record.model_copy(update=rented | {"server_config": backend.server.settings})


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
