"""Says on which operating systems a server can run."""

from __future__ import annotations

import sys

from art.errors import ConfigError


def check_server_platform(what: str) -> None:
    """Check that this operating system can run a server. Windows cannot: it has none of the signals and sockets.

    Args:
        what: the command or class that the user asked for.

    Raises:
        ConfigError: this is Windows.
    """
    if sys.platform == "win32":
        raise ConfigError(
            f"{what} needs Linux or macOS, and this is Windows. Run it in WSL, the Windows Subsystem for Linux, or "
            "start `art-server` on another machine and use `art.RemoteBackend(base_url, api_key)` here"
        )
