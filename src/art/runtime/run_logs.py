"""The logs of models whose scripts run on other machines."""

from __future__ import annotations

import asyncio

from art.protocol.run_log import LogRequest
from art.runtime.models import Models
from art.storage.layout import validate_name
from art.storage.received_log import append_once


class RunLogs:
    """Writes what scripts send into the data directory, where the page finds it."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def append(self, project: str, name: str, request: LogRequest) -> None:
        """Keep a row and its groups. What was kept before is not kept again.

        Raises:
            NotFoundError: the model is not registered.
            InvalidRequestError: the split is not a valid name.
        """
        model, _ = self._models.find(project, name)
        split = validate_name(request.split, param="split")
        paths = self._models.paths(model)
        await asyncio.to_thread(append_once, paths, split, request.step, request.row, request.groups)
