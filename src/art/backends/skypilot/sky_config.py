"""`SkyConfig`: the machine that SkyPilot is asked for, and the task file that asks for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from art.backends.ssh.ssh import shell_path
from art.errors import ConfigError

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
    disk_gb: int | None = None
    """Size of the machine's disk in GB; by default SkyPilot's, 256 GB on most clouds."""
    image: str | None = None
    """Image of the machine, as SkyPilot names it: `docker:owner/image:tag`, or the id of a cloud's image."""
    idle_minutes: int = 30
    """Minutes without rollouts and jobs after which the machine goes, whether or not a client is connected."""
    on_idle: Literal["stop", "down"] | None = None
    """What becomes of an idle machine: stopped with its disk kept, which costs a little, or deleted. `None`: deleted if
    its data is on a volume or it is a spot machine, which cannot be stopped; stopped otherwise."""
    volume: str | None = None
    """SkyPilot volume (`sky volumes`) for the server and its data, which outlives the machine."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of SkyPilot's `resources`, such as `{"cpus": "16+", "max_hourly_cost": 4.0}`."""
    sky: str | None = None
    """Path of SkyPilot's program `sky`; see `Sky`."""
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
            "use_spot": self.spot or None, "disk_size": self.disk_gb, "image_id": self.image, **self.resources,
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
