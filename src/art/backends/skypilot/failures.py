"""What SkyPilot's errors mean for a user of ART, and what to do about them."""

from __future__ import annotations

import re

from art.errors import ArtError, ConfigError, MachineError, UnreachableError

SHOWN_CHARACTERS = 1200
"""How much of SkyPilot's own message an error quotes."""

_FAILURES: tuple[tuple[str, type[ArtError], str], ...] = (
    # The first command also says "Failed to connect to SkyPilot API server", and then starts it.
    (r"ApiServerConnectionError|ServerTemporarilyUnavailable|API server process exited"
     r"|Failed to connect to SkyPilot API server(?![^\n]*Starting a local server)",
     UnreachableError,
     "SkyPilot's own server does not answer; `sky api info` says where it is expected, `sky api start` starts it"),
    (r"NameResolutionError|requests error \(ConnectionError\)", UnreachableError,
     "an address that SkyPilot needs cannot be reached from this machine; does its network work?"),
    (r"NoCloudAccessError|requires .* which is not enabled|No cloud is enabled|Cloud access is not set up", ConfigError,
     "SkyPilot has no access to this cloud; set up its credentials, then run `sky check`"),
    (r"InvalidSkyPilotConfigError|Invalid \w+ YAML", ConfigError,
     "SkyPilot refuses the task file"),
    (r"ResourcesMismatchError|do not match the existing", ConfigError,
     "a cluster of this name exists with other resources; take it down (`art launch down NAME`), or take another name"),
    (r"[Aa]uto(stop|down).*not supported", ConfigError,
     "this cloud cannot stop idle machines by itself; ART launches none that would cost money for ever"),
    (r"Stopping .*not supported|NotSupportedError", ConfigError, "SkyPilot cannot do this on this cloud"),
    (r"Catalog does not contain|No launchable resource", ConfigError,
     "no enabled cloud offers such a machine; `sky gpus list` lists what there is"),
    (r"quota|VcpuLimitExceeded|QUOTA_EXCEEDED", MachineError,
     "the account has no quota for this machine; ask the cloud for it, or choose another cloud, region or GPU"),
    (r"ResourcesUnavailableError|Failed to acquire resources|InsufficientInstanceCapacity|ZONE_RESOURCE_POOL_EXHAUSTED",
     MachineError, "no cloud has such a machine free now; try later, without --region, or with another GPU"),
    (r"ClusterDoesNotExist", MachineError, "SkyPilot knows no such cluster; it was taken down, or stopped itself"),
)  # fmt: skip
"""Patterns of SkyPilot's output in the order in which they are tried, the error to raise, and what it means."""


def explain(what: str, output: str) -> ArtError:
    """Make the error for a command of `sky` that failed.

    Args:
        what: the command, such as `sky launch`.
        output: what it wrote, without colours.
    """
    said = output.strip()[-SHOWN_CHARACTERS:]
    for pattern, kind, meaning in _FAILURES:
        if re.search(pattern, output):
            return kind(f"{what}: {meaning}. SkyPilot said:\n{said}")
    return MachineError(f"{what} failed. SkyPilot said:\n{said}")
