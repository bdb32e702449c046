"""`art launch --gpu H100:1`: a server on a machine that SkyPilot finds and rents."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art.backends.skypilot.records import KIND, make_record, read_record
from art.backends.skypilot.sky_config import SkyConfig
from art.backends.skypilot.sky_tool import SharedSky, Sky, install_sky
from art.backends.skypilot.skypilot_backend import SkyPilotBackend
from art.backends.ssh.install import Install
from art.backends.ssh.launched import Launched, LaunchRecord
from art.backends.ssh.ssh_backend import SshBackend
from art.config import ServerConfig
from art.errors import ConfigError

OPTIONS = (
    "nodes",
    "region",
    "spot",
    "idle",
    "on_idle",
    "budget",
    "disk",
    "image",
    "volume",
    "bucket",
    "sky",
    "dry_run",
    "install_sky",
)
_MINUTES = {"m": 1, "h": 60, "d": 1440}


def add_options(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group(
        "machines that SkyPilot rents (--gpu H100:1, or --cloud aws, gcp, kubernetes ...)"
    )
    options.add_argument("--nodes", type=int, metavar="N", help="machines that train together (default: 1)")
    options.add_argument("--region", help="region of the cloud, or context of Kubernetes")
    options.add_argument("--spot", action="store_true", help="a cheaper machine that its cloud may take away")
    options.add_argument(
        "--idle",
        type=idle_minutes,
        metavar="TIME",
        help="how long without rollouts and jobs until it goes (default: 30m)",
    )
    options.add_argument("--on-idle", choices=["down", "stop"], help="delete it when idle, or stop it (default: down)")
    options.add_argument("--budget", type=float, metavar="USD", help="take the machine down once it has cost this much")
    options.add_argument("--disk", type=int, metavar="GB", help="size of its disk (default: SkyPilot's)")
    options.add_argument("--image", help="image of the machine, such as docker:owner/image:tag")
    options.add_argument("--volume", help="SkyPilot volume that holds the data and outlives the machine")
    options.add_argument("--bucket", help="bucket into which the data is copied, such as s3://name")
    options.add_argument("--sky", metavar="FILE", help="SkyPilot's program (default: ART_SKY, or sky on PATH)")
    options.add_argument(
        "--dry-run", action="store_true", help="show the task file and SkyPilot's choice; rent nothing"
    )
    options.add_argument(
        "--install-sky", metavar="CLOUD", help="install SkyPilot for a cloud into ~/.art/skypilot, and launch nothing"
    )


def idle_minutes(text: str) -> int:
    """Read a time such as `30m`, `2h` or `45` (minutes)."""
    match = re.fullmatch(r"(\d+)([mhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30m or 2h, got {text!r}")
    return int(match[1]) * _MINUTES[match[2] or "m"]


def serves(cloud: str | None, args: argparse.Namespace) -> bool:
    if cloud is not None or args.host is not None:
        return cloud is not None and cloud != "ssh"
    return isinstance(args.gpu, str) or args.install_sky is not None


def new_backend(args: argparse.Namespace, name: str | None) -> SkyPilotBackend:
    if args.gpu is True:
        raise ConfigError("--gpu needs the kind and number of GPUs to rent, such as --gpu H100:1")
    config = SkyConfig(gpu=args.gpu, cloud=args.cloud, region=args.region, spot=args.spot, **_given(args))
    if args.python is not None:
        raise ConfigError("--python does not apply to machines that SkyPilot rents: the task file installs one")
    settings: dict[str, Any] = {name: value for name, value in (("models", args.models), ("gpu", args.gpu)) if value}
    settings |= {"gpu": True} if args.gpu else {}
    install = Install(
        source=args.source, extras=tuple(args.extras or ("local",)), index_url=args.index_url, folder=args.folder
    )
    return SkyPilotBackend(
        cluster=name or "art", config=config, install=install,
        server_config=ServerConfig.model_validate(settings) if settings else None,
    )  # fmt: skip


def _given(args: argparse.Namespace) -> dict[str, Any]:
    names = {"idle": "idle_minutes", "on_idle": "on_idle", "budget": "budget_usd", "disk": "disk_gb", "image": "image",
             "volume": "volume", "nodes": "num_nodes", "bucket": "bucket", "sky": "sky"}  # fmt: skip
    return {field: value for name, field in names.items() if (value := getattr(args, name)) is not None}


async def do_instead(args: argparse.Namespace) -> bool:
    """Do what an option asks for in place of a launch, and return whether one did."""
    if args.install_sky is not None:
        path = await install_sky(args.install_sky, lambda line: print(line, file=sys.stderr))
        print(path)
        print(f"`{path} check` says what SkyPilot still needs to know about your account", file=sys.stderr)
        return True
    if args.dry_run:
        backend = new_backend(args, args.name)
        print(backend.task(), end="")
        with_file = Path.cwd() / f".{backend.cluster.name}.sky.yaml"
        with_file.write_text(backend.task(), encoding="utf-8")
        try:
            ran = await Sky(args.sky).run("launch", "--dryrun", "--yes", "-c", backend.cluster.name, str(with_file))
        finally:
            with_file.unlink()
        print("\n".join(f"# {line}".rstrip() for line in ran.stdout.strip().splitlines()))
        return True
    return False


async def prepare(launched: Launched, args: argparse.Namespace, backend: SshBackend, name: str | None) -> None:
    """Nothing: the backend records the machine itself, when it rents it."""


def new_record(args: argparse.Namespace, backend: SshBackend, name: str | None) -> LaunchRecord:
    assert isinstance(backend, SkyPilotBackend)
    assert backend.local_port is not None
    settings = {"config": backend.config, "server_config": backend.server_config}
    return make_record(
        backend.cluster.name, backend.server.folder, backend.local_port, settings,
        launched_at=backend.first_launched_at(),
    )  # fmt: skip


def share_questions(backends: Sequence[SshBackend]) -> None:
    """Ask each program `sky` about all of its clusters at once: an answer takes it seconds to a minute."""
    made = [backend for backend in backends if isinstance(backend, SkyPilotBackend)]
    for program in {backend.config.sky for backend in made}:
        sharing = [backend.cluster for backend in made if backend.config.sky == program]
        shared = SharedSky(program, [cluster.name for cluster in sharing])
        for cluster in sharing:
            cluster.sky = shared


def backend(record: LaunchRecord) -> SkyPilotBackend:
    assert record.kind == KIND
    config, server_config = read_record(record)
    install = Install(source="installed", folder=record.folder)
    made = SkyPilotBackend(cluster=record.name, config=config, install=install, server_config=server_config)
    made.local_port = record.local_port
    return made
