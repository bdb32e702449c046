"""Ports for servers that have to be told theirs before they start."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections: such a connection would take a free port before the server."""


def free_port() -> int:
    """Return a port that nothing on this machine uses."""
    for port in random.SystemRandom().sample(PORTS, 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError(f"100 random ports of {PORTS} are in use")
