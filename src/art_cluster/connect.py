"""Join a Ray cluster or start one here. What is wrong is said within seconds; Ray itself tries for minutes."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from art.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0
"""Seconds in which a cluster must accept a connection."""
OBJECT_STORE_BYTES = 256 * 2**20
"""Shared memory of a Ray that is started here."""
THIS_MACHINE = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray/ray_current_cluster"
"""File in which `ray start` writes the address of this machine's cluster."""
_JOIN_TRIES = "RAY_gcs_server_port_wait_time_s"
"""Variable of Ray: how often, about once a second, it asks a head that refuses. By default 20 times."""


def import_ray() -> Any:
    """Return the package `ray`. Raises `ConfigError` if it is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "this needs Ray, which is not installed: pip install 'agent-reinforcement-trainer[cluster]'"
        ) from None
    return ray


def connect(address: str | None, **options: Any) -> None:
    """Join the cluster at `address`, that of the variable RAY_ADDRESS, or start one here. Call it in the main thread:
    Linux ends the processes of a local Ray with the thread that has started them.

    Raises:
        ConfigError: there is no cluster at the address, or it refuses: another version of Ray or Python, no token.
    """
    ray = import_ray()
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options = {"logging_level": logging.ERROR, **options}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        try:
            real = THIS_MACHINE.read_text(encoding="utf-8").strip() if address == "auto" else address
            where = urlsplit(real if "://" in real else f"gcs://{real}")
            socket.create_connection((where.hostname or "", where.port or 0), CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {address} ({error}): start one with `ray start --head` there, or give its "
                "address, HOST:6379 or ray://HOST:10001, here or in RAY_ADDRESS; without one a cluster is started on "
                "this machine"
            ) from error
    is_brief = address != "local" and _JOIN_TRIES not in os.environ
    if is_brief:
        os.environ[_JOIN_TRIES] = f"{CONNECT_TIMEOUT_S:.0f}"
    try:
        ray.init(address=address, **options)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cannot use the Ray cluster at {address}: {error}. Something answers there; compare this machine's token "
            "(~/.ray/auth_token, RAY_AUTH_TOKEN) and its versions of Ray and Python with the cluster's"
        ) from error
    finally:
        if is_brief:
            del os.environ[_JOIN_TRIES]


def describe_room() -> str:
    """Say what a cluster has and what of it is free, such as "2 nodes with 8 CPU (3 free)"."""
    ray = import_ray()
    total, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    rest = {name: size for name, size in total.items() if not name.startswith("node:") and "memory" not in name}
    rest = {name: size for name, size in rest.items() if "_group_" not in name and name != "bundle"}
    shown = ", ".join(f"{size:g} {name} ({free.get(name, 0.0):g} free)" for name, size in sorted(rest.items()))
    return f"{nodes} nodes with {shown}"
