"""`art launch --cloud ssh`: a server on a machine that exists already and that ssh reaches."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from art.backends.ssh.install import Install
from art.backends.ssh.launched import Launched, LaunchRecord
from art.backends.ssh.ssh import Ssh
from art.backends.ssh.ssh_backend import SshBackend
from art.backends.ssh.tunnel import free_port
from art.config import ServerConfig
from art.errors import ConfigError

OPTIONS = ("host", "node", "address", "ssh_port", "identity", "ssh_config")


def add_options(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("machines reached by ssh (--cloud ssh)")
    options.add_argument("--host", metavar="[USER@]MACHINE", help="the machine, or an alias of ~/.ssh/config")
    options.add_argument(
        "--node", action="append", metavar="[USER@]MACHINE[=ADDRESS]",
        help="a further machine that trains together with it; may be repeated. ADDRESS: where the machine of --host "
        "reaches it (default: where this machine does)",
    )  # fmt: skip
    options.add_argument(
        "--address", help="of the machine of --host in the network of the nodes (default: found by its route to them)"
    )
    options.add_argument("--ssh-port", type=int, metavar="PORT", help="port of its ssh server")
    options.add_argument("--identity", metavar="FILE", help="private key to use")
    options.add_argument("--ssh-config", metavar="FILE", help="configuration in place of ~/.ssh/config")


def serves(cloud: str | None, args: argparse.Namespace) -> bool:
    return cloud == "ssh" or (cloud is None and args.host is not None)


async def do_instead(args: argparse.Namespace) -> bool:
    return False


def new_backend(args: argparse.Namespace, name: str | None) -> SshBackend:
    if args.host is None:
        raise ConfigError("--cloud ssh needs a machine: --host USER@MACHINE")
    if isinstance(args.gpu, str):
        raise ConfigError(
            f"--gpu takes no value with --cloud ssh: the machine has the GPUs that it has; got {args.gpu!r}"
        )
    settings = {name: value for name, value in (("models", args.models), ("gpu", args.gpu)) if value}
    install = Install(
        source=args.source, extras=tuple(args.extras or ("local",)), index_url=args.index_url, python=args.python,
        folder=args.folder,
    )  # fmt: skip
    return SshBackend(
        Ssh(args.host, port=args.ssh_port, identity=args.identity, config=args.ssh_config),
        nodes=args.node or (), address=args.address, name=name or "default", install=install,
        server_config=ServerConfig.model_validate(settings) if settings else None,
    )  # fmt: skip


async def prepare(launched: Launched, args: argparse.Namespace, backend: SshBackend, name: str | None) -> None:
    """Record a machine that lets us in before anything is installed, so that a failed launch can be taken down."""
    record = new_record(args, backend, name)
    if record.name not in launched.names():
        await backend.server.status()  # raises if it does not
        launched.save(record, "")


def new_record(args: argparse.Namespace, backend: SshBackend, name: str | None) -> LaunchRecord:
    ssh, tunnel = backend.ssh, backend.tunnel
    local_port = free_port() if tunnel is None else tunnel.local_port
    return LaunchRecord(
        name=name or default_name(ssh), host=ssh.host, user=ssh.user, port=ssh.port, folder=backend.server.folder,
        identity=_absolute(args.identity), ssh_config=_absolute(args.ssh_config), local_port=local_port,
        details={"nodes": json.dumps(args.node)} if args.node else {},
    )  # fmt: skip


def _absolute(file: str | None) -> str | None:
    """The path of a file of ssh for a record, which is also used from other working directories."""
    return file if file in (None, "none") else str(Path(file).expanduser().absolute())


def default_name(ssh: Ssh) -> str:
    """The name of a record that was given none: that of the machine, as far as it can be part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", ssh.host).strip("-_")[:64] or "default"


def share_questions(backends: Sequence[SshBackend]) -> None:
    """Nothing: each machine has to be asked by itself."""


def backend(record: LaunchRecord) -> SshBackend:
    made = SshBackend(
        record.ssh(), nodes=json.loads(record.details.get("nodes", "[]")), name=record.name,
        install=Install(source="installed", folder=record.folder),
    )  # fmt: skip
    made.local_port = record.local_port
    return made
