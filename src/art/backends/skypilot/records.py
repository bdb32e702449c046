"""What is kept on this machine about a cluster of SkyPilot, beside its record and key.

~/.art/launched/NAME.sky.yaml     the task file of its last launch
~/.art/launched/NAME.data/        the copy of its data directory
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art.backends.skypilot.sky_config import SkyConfig
from art.backends.ssh.launched import Launched, LaunchRecord
from art.config import ServerConfig
from art.errors import StorageError

KIND = "skypilot"


def task_path(launched: Launched, cluster: str) -> Path:
    return launched.folder / f"{cluster}.sky.yaml"


def copy_folder(launched: Launched, cluster: str) -> Path:
    return launched.folder / f"{cluster}.data"


def make_record(
    cluster: str, folder: str, local_port: int, settings: Mapping[str, Any], *, launched_at: float
) -> LaunchRecord:
    """Make the record of a cluster.

    Args:
        settings: `config`, a `SkyConfig`, and `server_config`, a `ServerConfig` or `None`.
        launched_at: seconds since 1970 of the first launch, from which on its costs count.
    """
    config, server_config = settings["config"], settings["server_config"]
    details = {"config": json.dumps(dataclasses.asdict(config))}
    if server_config is not None:
        details["server_config"] = server_config.model_dump_json(exclude_unset=True)
    return LaunchRecord(
        name=cluster, kind=KIND, host=cluster, ssh_config=config.ssh_config, folder=folder, local_port=local_port,
        launched_at=launched_at, details=details,
    )  # fmt: skip


def read_record(record: LaunchRecord) -> tuple[SkyConfig, ServerConfig | None]:
    """Return the settings that a cluster was launched with.

    Raises:
        StorageError: the record is of another version of ART.
    """
    try:
        config = SkyConfig(**json.loads(record.details["config"]))
        server_config = record.details.get("server_config")
        return config, None if server_config is None else ServerConfig.model_validate_json(server_config)
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"the record of {record.name!r} is damaged or of another version of ART: {error}") from error
