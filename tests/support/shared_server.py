"""Programs that open a `LocalBackend` of their own, on a server that runs already: starting one takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import art
from art.client.client import ServerClient


def on(server: art.LocalBackend) -> type[art.LocalBackend]:
    """`LocalBackend` whose server is that of another one. Models are logged in the directory that the program names."""

    class Shared(art.LocalBackend):
        asked_for: list[Path | None] = []
        """The data directories that programs named."""

        def __init__(self, *, path: Any = None, **options: Any) -> None:
            super().__init__(path=server.path, **options)
            self.data_dir = Path(path or ".art").resolve()
            self.asked_for.append(path)

        async def _connection(self) -> ServerClient:
            self._client = await server.open()
            return self._client

    return Shared
