"""Runs the programs of clients."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from tests.clients.clients import CLIENTS, FOLDER, Client

TIMEOUT_S = 300
_MAX_ERROR = 4_000


def each_client() -> list[Any]:
    """The parameters of a test of every client; those that cannot run here are skipped with the reason."""
    return [
        pytest.param(client.name, marks=pytest.mark.skipif(not client.needs.exists(), reason=client.why_not))
        for client in CLIENTS.values()
    ]


async def run(client: Client, task: str, *, url: str, key: str, model: str) -> dict[str, Any]:
    """Run one task against the base URL of a rollout, and return what the program printed.

    The program gets no other variables than these, so that keys and proxies of the user play no part.
    """
    environment = {
        "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", ""), "PYTHONPATH": str(FOLDER / "programs"),
        "CLIENT_URL": url, "CLIENT_KEY": key, "CLIENT_MODEL": model,
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *client.command, task, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            printed, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{client.name} {task}: {errors.decode()[-_MAX_ERROR:]}"
    said: dict[str, Any] = json.loads(printed.decode().splitlines()[-1])
    return said
