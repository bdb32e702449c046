"""`Relaunches`: whether a machine that was lost is replaced by another one."""

from __future__ import annotations

import logging
import time

from art.backends.skypilot.cluster import ClusterState
from art.backends.skypilot.sky_config import SkyConfig
from art.errors import MachineError

logger = logging.getLogger(__name__)

_DAY_S = 86_400.0


class Relaunches:
    """The machines of one backend that were lost, and when it was last used."""

    def __init__(self, cluster: str, config: SkyConfig) -> None:
        self.last_active_at = time.monotonic()
        self._cluster = cluster
        self._config = config
        self._times: list[float] = []

    def check(self, state: ClusterState | None) -> None:
        """Note that a machine is lost, which is replaced now.

        Args:
            state: what SkyPilot says about the cluster.

        Raises:
            MachineError: it was idle, had data that is nowhere else, or was one of too many; so it is not replaced.
        """
        config = self._config
        what = f"the machine of {self._cluster!r} is lost ({state.describe() if state else 'SkyPilot has none'})"
        idle_s = time.monotonic() - self.last_active_at
        if idle_s >= 60 * config.idle_minutes:
            raise MachineError(
                f"{what}; it was idle for {idle_s / 60:.0f} minutes, so it is not replaced. Make a new backend to go on"
            )
        if not config.outlives:
            raise MachineError(
                f"{what}, and its data with it. With a volume, a bucket or pull_minutes in SkyConfig it is replaced"
            )
        now = time.monotonic()
        self._times = [at for at in self._times if now - at < _DAY_S]
        if len(self._times) >= config.num_relaunches:
            raise MachineError(f"{what}, after {len(self._times)} others within a day; it is not replaced")
        self._times.append(now)
        logger.warning("%s: another one is launched (%d of %d)", what, len(self._times), config.num_relaunches)
