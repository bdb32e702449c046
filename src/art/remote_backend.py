"""`RemoteBackend`: a client of an `art-server` on another machine. It needs the core package only."""

from __future__ import annotations

import os

from art.backend import Backend
from art.errors import ConfigError
from art.storage.local_key import find_local_key


class RemoteBackend(Backend):
    """Trains and serves on a server that already runs. Training is the same as with `LocalBackend`.

    Only rollouts run on this machine. The connection may be lost and the server restarted at any time: calls are
    repeated, and a training job continues under its id. Logs of models (`history.jsonl`, trajectories) are kept on this
    machine, and sent to the server, whose page shows them; checkpoints are kept on the server.
    """

    shares_files = False

    def __init__(self, base_url: str | None = None, api_key: str | None = None, *, share_log: bool = True) -> None:
        """
        Args:
            base_url: address of the server, like `http://gpu-machine:5000`; by default the variable ART_SERVER_URL.
            api_key: API key; by default the variable ART_API_KEY, or the key that a server on this machine made.
            share_log: whether the server gets what `model.log` writes: metrics, and trajectories with the texts of
                judges. If not, they are on this machine only, and `art view` shows them here.

        Raises:
            ConfigError: there is no address, or it is not valid.
        """
        base_url = base_url or os.environ.get("ART_SERVER_URL")
        if not base_url:
            raise ConfigError(
                "RemoteBackend needs the address of an `art-server`: pass base_url, or set ART_SERVER_URL"
            )
        self.shares_log = share_log
        super().__init__(base_url, api_key or os.environ.get("ART_API_KEY") or find_local_key(base_url))
