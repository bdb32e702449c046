"""The server's side of an engine in a process of its own: an `Engine` over a connection to it. Never loads torch.

The process may die at any moment. Its supervisor brings it back with the same adapters, and what was being sampled goes
on from the last token that arrived. Where random numbers depend on `(seed, index)` only (`EngineInfo.draws_by_index`),
the completion is the one that would have come anyway.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk
from art.errors import ProcessError
from art.protocol.rpc import RpcClient

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Deaths of the engine that one call survives."""


class ProcessEngine:
    """Implements `art.engine.SleepingEngine`; asks an engine that can sleep to do so.

    `connect` gives the live connection to a started engine that holds all loaded adapters. It waits while the process
    restarts, and raises `ProcessError` when there is no hope.
    """

    def __init__(self, connect: Callable[[], Awaitable[RpcClient]]) -> None:
        self._connect = connect

    async def info(self) -> EngineInfo:
        return EngineInfo(**await self._call("info"))

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        received: list[int] = []
        for attempt in range(MAX_RESTARTS + 1):
            client = await self._connect()
            body = _request_body(_continue(request, received))
            try:
                async with aclosing(client.stream("generate", request=body, stream=stream)) as bodies:
                    async for raw in bodies:
                        chunk = _chunk(raw)
                        received += chunk.token_ids
                        yield chunk
                return
            except ProcessError as error:
                _give_up_or_log("generate", attempt, error)

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        return AdapterInfo(**await self._call("load_adapter", name=name, path=str(path)))

    async def prepare_weights(self, name: str, path: Path) -> None:
        """Do what can be done before `load_adapter` while requests run; only where that waits until none does."""
        await self._call("prepare_weights", name=name, path=str(path))

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name=name)

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        logprobs: list[float] = await self._call("score", token_ids=token_ids, adapter=adapter)
        return logprobs

    async def stats(self) -> dict[str, float]:
        stats: dict[str, float] = await self._call("stats")
        return stats

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def _call(self, method: str, **params: Any) -> Any:
        """The result of a call that may be repeated."""
        for attempt in range(MAX_RESTARTS + 1):
            client = await self._connect()
            try:
                return await client.call(method, **params)
            except ProcessError as error:
                _give_up_or_log(method, attempt, error)
        raise AssertionError("unreachable")


def _give_up_or_log(method: str, attempt: int, error: ProcessError) -> None:
    if attempt == MAX_RESTARTS:
        raise error
    logger.warning("the engine died during `%s`; trying again (%d of %d)", method, attempt + 1, MAX_RESTARTS)


def _continue(request: GenerateRequest, received: list[int]) -> GenerateRequest:
    """The request for what is still missing after the tokens `received`."""
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids + received,
        max_tokens=request.max_tokens - len(received),
        first_index=request.first_index + len(received),
    )


def _request_body(request: GenerateRequest) -> dict[str, Any]:
    """`dataclasses.asdict` without its copy of every token."""
    return {field.name: getattr(request, field.name) for field in fields(request)}


def _chunk(body: dict[str, Any]) -> TokenChunk:
    top = [[(token, logprob) for token, logprob in alternatives] for alternatives in body["top_logprobs"]]
    return TokenChunk(**body | {"top_logprobs": top})
