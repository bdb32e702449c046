"""The task file of SkyPilot: what is rented, what is set up there, and when it goes. It can be read, kept and edited.

    resources    the machine, and when SkyPilot stops it; no port is opened
    num_nodes    how many such machines
    setup        Python and ART, in an environment of the server's folder, on each machine
    run          `watch.py`, which ends when the server is of no more use; then SkyPilot's idle minutes begin
                 (on the first machine; the others have nothing to run)
    config.hooks the last copy into the bucket before the machine goes

The server itself is started over ssh, as on any other machine, so its key is in no file or command of SkyPilot.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from art.backends.skypilot.sky_config import SkyConfig
from art.backends.ssh.ssh import shell_path

VOLUME_PATH = "/art-volume"
BUCKET_PATH = "/art-bucket"
PYTHON_VERSION = "3.12"
"""Python of the server's environment. That of SkyPilot on the machine is older than ART needs."""
INSTALL_TIMEOUT_MINUTES = 60
"""How long the job waits for ART to be installed over ssh, where the task file does not install it itself."""
HOOK_TIMEOUT_S = 1800
NODE_ADDRESS = "node-address"
"""File in the server's folder with the address of the machine in the network of its cluster."""
SET_UP = "set-up"
"""File in the server's folder that `setup` leaves at its end. SkyPilot may say that a machine is up before that."""


def make_task(cluster: str, config: SkyConfig, *, folder: str, requirement: str | None) -> dict[str, Any]:
    """Make the content of the task file.

    Args:
        cluster: name of the cluster, and of the folder of its copy in the bucket.
        folder: folder of the server on the machine; begins with `~/` or `/`.
        requirement: what pip installs in `setup`; `None` if ART is sent over ssh instead.
    """
    task: dict[str, Any] = {"name": cluster, "num_nodes": config.num_nodes, "resources": _resources(config)}
    if config.bucket is not None:
        # SkyPilot runs hooks on every machine; only the data of the first one has a registry.
        copy = (
            f"test ! -e {folder}/data/art.db || "
            f"{_python(folder)} -m art.backends.skypilot.copying copy {folder}/data {copy_path(cluster)}"
        )
        task["config"] = {"hooks": [{"run": copy, "events": ["stop", "down"], "timeout": HOOK_TIMEOUT_S}]}
        task["file_mounts"] = {BUCKET_PATH: {"source": config.bucket, "mode": "MOUNT"}}
    if config.volume is not None:
        task["volumes"] = {VOLUME_PATH: config.volume}
    task["setup"] = _setup(config, folder, requirement)
    task["run"] = _run(cluster, config, folder)
    return task


def copy_path(cluster: str) -> str:
    """Folder of the cluster's data directory in the mounted bucket."""
    return f"{BUCKET_PATH}/art/{cluster}"


def write_yaml(value: Mapping[str, Any], indent: int = 0) -> str:
    """Write a mapping as YAML. Texts of several lines become blocks; the rest is written as JSON, which YAML reads."""
    lines = []
    for key, item in value.items():
        head = f"{' ' * indent}{key}:"
        if isinstance(item, Mapping) and item:
            lines += [head, write_yaml(item, indent + 2).rstrip("\n")]
        elif isinstance(item, str) and "\n" in item:
            lines += [f"{head} |", *(f"{' ' * (indent + 2)}{line}".rstrip() for line in item.splitlines())]
        else:
            lines.append(f"{head} {json.dumps(item)}")
    return "\n".join(lines) + "\n"


def _resources(config: SkyConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if config.cloud is not None:
        values["infra"] = config.cloud + (f"/{config.region}" if config.region else "")
    if config.gpu is not None:
        values["accelerators"] = config.gpu if ":" in config.gpu else f"{config.gpu}:1"
    if config.spot:
        values["use_spot"] = True
    if config.disk_gb is not None:
        values["disk_size"] = config.disk_gb
    if config.image is not None:
        values["image_id"] = config.image
    autostop = {
        "idle_minutes": config.sky_idle_minutes, "down": config.on_idle == "down", "wait_for": "jobs_and_ssh",
    }  # fmt: skip
    return values | dict(config.resources) | {"autostop": autostop}


def _python(folder: str) -> str:
    return f"{shell_path(folder)}/venv/bin/python"


def _setup(config: SkyConfig, folder: str, requirement: str | None) -> str:
    """Make Python and the server's environment. Every line may run again: SkyPilot repeats it on a running machine."""
    where = shell_path(folder)
    lines = [
        "set -e",
        f"umask 077; mkdir -p {where}; rm -f {where}/{SET_UP}",
        'export PATH="$HOME/.local/bin:$PATH"',
        "command -v uv > /dev/null || python3 -m pip install --user uv",
        f"[ -x {_python(folder)} ] || uv venv --seed --python {PYTHON_VERSION} {where}/venv",
    ]
    if config.volume is not None:
        lines += [
            f"[ -w {VOLUME_PATH} ] || sudo chown $(id -u) {VOLUME_PATH}",
            f"mkdir -p {VOLUME_PATH}/data; ln -sfn {VOLUME_PATH}/data {where}/data",
        ]
    if config.num_nodes > 1:
        own = '"$SKYPILOT_SETUP_NODE_IPS" | sed -n "$((SKYPILOT_SETUP_NODE_RANK + 1))p"'
        lines.append(f"printf '%s\\n' {own} > {where}/{NODE_ADDRESS}")
    if requirement is not None:
        lines.append(f"{_python(folder)} -m pip install {shlex.quote(requirement)}")
    lines.append(f"touch {where}/{SET_UP}")
    return "\n".join(lines) + "\n"


_ONLY_FIRST = ('[ "$SKYPILOT_NODE_RANK" = 0 ] || exit 0  # the job goes on until all machines have ended it',)


def _run(cluster: str, config: SkyConfig, folder: str) -> str:
    idle_minutes = config.idle_minutes - config.sky_idle_minutes
    watch = f"{_python(folder)} -m art.backends.skypilot.watch {shell_path(folder)} --idle-minutes {idle_minutes}"
    if config.bucket is not None:
        watch += f" --copy-to {copy_path(cluster)} --copy-every-minutes {config.copy_minutes:g}"
    return (
        "\n".join(
            [
                *_ONLY_FIRST[: config.num_nodes - 1],
                "# Ends when the server is of no more use; then SkyPilot stops the machine.",
                f"for second in $(seq {INSTALL_TIMEOUT_MINUTES * 60 // 5}); do",
                f"  {_python(folder)} -c 'import art.backends.skypilot.watch' 2> /dev/null && break",
                "  sleep 5",
                "done",
                f"exec {watch}",
            ]
        )
        + "\n"
    )
