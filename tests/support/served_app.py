"""The in-process application of `tests.support.app` behind a real socket, for clients that cannot be given a transport."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

import art
from art.backend import ModelRegistration
from art.client.client import ServerClient
from tests.support.app import KEY, STATUS, AppBench, open_app
from tests.support.gateway import Bench, open_bench


@dataclass
class ServedApp:
    app: AppBench
    url: str
    policy: art.TrainableModel
    """Registered with the server."""
    outside: art.Model
    """The same endpoint, as if it were somebody else's."""


@asynccontextmanager
async def serve_app(
    directory: Path, tokenizer: Path, opener: Callable[..., AbstractAsyncContextManager[Bench]] = open_bench
) -> AsyncGenerator[ServedApp, None]:
    async with open_app(directory, tokenizer, opener) as app:
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app.app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve([listener]))
        backend = art.Backend(url, KEY)
        backend._client = ServerClient(url, KEY)
        policy = art.TrainableModel(name="agent", project="games", base_model="tiny")
        policy._backend = backend
        policy._adopt(ModelRegistration(server_url=url, api_key=KEY, status=STATUS))
        outside = art.Model(
            name="other", project="games", inference_base_url=f"{url}/v1", inference_api_key=KEY,
            inference_model_name="games/agent",
        )  # fmt: skip
        try:
            yield ServedApp(app, url, policy, outside)
        finally:
            await policy.close()
            await outside.close()
            await backend.close()
            server.should_exit = True
            await serving
