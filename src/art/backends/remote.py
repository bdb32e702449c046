"""An ART server on another machine: `art-server` there, this here. Needs the core package only."""

from __future__ import annotations

import os

from art.backend import Backend
from art.errors import ConfigError
from art.storage.local_key import find_local_key


class RemoteBackend(Backend):
    """Trains and serves on a server that somebody else started. What is trained, and how, is as with `LocalBackend`.

    Only rollouts run here. The connection may be lost and the server restarted at any time: calls are repeated, and a
    training job goes on under its id. Logs of models (`history.jsonl`, trajectories) are kept here, checkpoints there.
    """

    shares_files = False

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        """
        Args:
            base_url: of the server, like `http://gpu-machine:5000`; by default the variable ART_SERVER_URL.
            api_key: by default the variable ART_API_KEY, or the key that a server on this machine made for itself.

        Raises:
            ConfigError: there is no address, or it is none.
        """
        base_url = base_url or os.environ.get("ART_SERVER_URL")
        if not base_url:
            raise ConfigError(
                "RemoteBackend needs the address of an `art-server`: pass base_url, or set ART_SERVER_URL"
            )
        super().__init__(base_url, api_key or os.environ.get("ART_API_KEY") or find_local_key(base_url))
