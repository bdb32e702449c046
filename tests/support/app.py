"""The real server application over a gateway with a scripted engine, in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx2

from art.client.client import ServerClient
from art.protocol.training import ModelStatus
from art.server.app import App
from tests.support.gateway import Bench, open_bench

KEY = "secret-key"
STATUS = ModelStatus(project="games", name="agent", base_model="tiny", step=3, inference_name="games/agent")


class GatewayOnly:
    """A runtime that knows the gateway's one model and trains nothing."""

    def __init__(self, bench: Bench) -> None:
        self.gateway = bench.gateway
        self.resolver = self.models = self
        self._max_context = bench.resolver.policy.max_context

    async def status(self, project: str, name: str) -> ModelStatus:
        return STATUS.model_copy(update={"max_context": self._max_context})

    def name_in(self, project: str, model: str) -> str | None:
        return model if model.startswith(f"{project}/") else None


class AppBench:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.app = App(GatewayOnly(bench), api_key=KEY)  # type: ignore[arg-type]

    def http(self, key: str = KEY) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=self.app), base_url="http://art.test",
            headers={"authorization": f"Bearer {key}"},
        )  # fmt: skip

    def client(self) -> ServerClient:
        return ServerClient("http://art.test", KEY, transport=httpx2.ASGITransport(app=self.app))


@asynccontextmanager
async def open_app(
    directory: Path, tokenizer: Path, opener: Callable[..., AbstractAsyncContextManager[Bench]] = open_bench
) -> AsyncGenerator[AppBench, None]:
    async with opener(directory, tokenizer) as bench:
        yield AppBench(bench)
