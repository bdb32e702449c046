"""`SkyConfig`: the machine that SkyPilot is asked for, and what is done with its data and its costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from art.errors import ConfigError

MAX_NODES = 64
SKY_IDLE_MINUTES = 5
"""Longest time that SkyPilot itself waits after ART's job on the machine has ended."""
_OURS = {
    "accelerators": "gpu", "infra": "cloud and region", "cloud": "cloud", "region": "region", "use_spot": "spot",
    "disk_size": "disk_gb", "image_id": "image", "autostop": "idle_minutes and on_idle",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyConfig:
    """The machine that SkyPilot is asked for, and what is done with its data and its costs."""

    gpu: str | None = None
    """Kind and number of GPUs of each machine, such as `H100:1`, with SkyPilot's names (`sky gpus list`). `None`: no
    GPU."""
    num_nodes: int = 1
    """Number of machines in the cluster, which can train one model together (`TrainerConfig.num_nodes`). The server and
    its data are on the first one. All of them cost money for as long as the cluster exists."""
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
    on_idle: Literal["down", "stop"] = "down"
    """What becomes of an idle machine: deleted, or stopped with its disk kept, which costs a little. A stopped one is
    started again by the next use. Spot machines cannot be stopped."""
    volume: str | None = None
    """SkyPilot volume for the data directory, which outlives the machine (`sky volumes`)."""
    bucket: str | None = None
    """Bucket, such as `s3://name` or `gs://name`, into which the machine copies its data directory."""
    copy_minutes: float = 10.0
    """Minutes between two copies into the bucket."""
    pull_minutes: float | None = 30.0
    """Minutes between two copies of the data directory to this machine, while a backend is open; it is also copied when
    the backend is closed and before it takes the machine down. `None`: never. With a volume or bucket it is not needed
    and not done."""
    budget_usd: float | None = None
    """Money for this cluster, by SkyPilot's prices. Once it is spent, the machine goes."""
    num_relaunches: int = 3
    """How often a machine that was lost is replaced by a new one within a day."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of SkyPilot's `resources`, such as `{"cpus": "16+", "max_hourly_cost": 4.0}`."""
    sky: str | None = None
    """Path of SkyPilot's program `sky`; see `Sky`."""
    ssh_config: str | None = None
    """Configuration file of ssh in place of `~/.ssh/config`, into which SkyPilot writes the names of its machines."""
    launch_timeout_s: float = 3600.0
    """Seconds that finding and starting a machine may take."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is impossible; the message names it.
        """
        if self.gpu is not None and not re.fullmatch(r"[A-Za-z0-9._-]+(:[0-9]+)?", self.gpu):
            raise ConfigError(f'gpu is a kind and a number, such as "H100:1"; got {self.gpu!r}', param="gpu")
        if self.region is not None and self.cloud is None:
            raise ConfigError(f"region={self.region!r} needs its cloud", param="region")
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise ConfigError(f"num_nodes must be 1 to {MAX_NODES}, got {self.num_nodes!r}", param="num_nodes")
        if self.num_nodes > 1 and self.volume is not None:
            raise ConfigError(
                f"a volume is the disk of one machine, and num_nodes is {self.num_nodes}; use a bucket", param="volume"
            )
        if self.idle_minutes < 2:
            raise ConfigError(f"idle_minutes must be 2 or more, got {self.idle_minutes}", param="idle_minutes")
        if self.on_idle not in ("down", "stop"):
            raise ConfigError(f'on_idle is "down" or "stop", got {self.on_idle!r}', param="on_idle")
        if self.spot and self.on_idle == "stop":
            raise ConfigError('spot machines cannot be stopped; leave on_idle="down"', param="on_idle")
        if self.volume is not None and self.bucket is not None:
            raise ConfigError("give a volume or a bucket for the data directory, not both", param="volume")
        if self.bucket is not None and not re.fullmatch(r"[a-z0-9]+://[^/\s]+", self.bucket):
            raise ConfigError(f"bucket is an address like s3://name, got {self.bucket!r}", param="bucket")
        for name in ("copy_minutes", "pull_minutes", "budget_usd"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value!r}", param=name)
        self._check_resources()

    def _check_resources(self) -> None:
        if "ports" in self.resources:
            raise ConfigError("resources.ports would open the machine to the internet; ART uses an ssh tunnel only")
        if taken := sorted(self.resources.keys() & _OURS.keys()):
            raise ConfigError(f"resources.{taken[0]} is set by {_OURS[taken[0]]} of SkyConfig", param="resources")

    @property
    def outlives(self) -> bool:
        """Whether the data directory is somewhere else than on the machine's own disk, or is copied home."""
        return self.volume is not None or self.bucket is not None or self.pull_minutes is not None

    @property
    def is_pulled(self) -> bool:
        """Whether the data directory is copied to this machine."""
        return self.pull_minutes is not None and self.volume is None and self.bucket is None

    @property
    def sky_idle_minutes(self) -> int:
        """Minutes that SkyPilot waits after the job on the machine has ended; part of `idle_minutes`."""
        return min(SKY_IDLE_MINUTES, self.idle_minutes // 2)
