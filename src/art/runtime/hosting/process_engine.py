"""A proxy for an engine that runs in its own process. It sends calls over a connection and never loads torch.

The process may die at any moment. Sampling then goes on after the last token that arrived: in another process that
holds the same adapters, or when its supervisor has brought it back with them. Where random numbers depend on
`(seed, index)` only (`EngineInfo.draws_by_index`), the completion is the same as without the death.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk
from art.errors import ProcessError
from art.protocol import calls
from art.protocol.calls import Call, Result
from art.protocol.rpc import Connect, RpcClient, note_death, retry_on_process_death


class ProcessEngine:
    """A proxy for an engine in another process: sends each call there, and repeats it if the process dies meanwhile.

    Call `sleep` and `wake` only if that engine is a `SleepingEngine`.
    """

    def __init__(self, connect: Connect, attempts: int) -> None:
        """
        Args:
            connect: returns the live connection to a started engine that holds all loaded adapters.
            attempts: how often each call is tried, if the process dies while it serves the call.
        """
        self._connect = connect
        self._attempts = attempts

    async def info(self) -> EngineInfo:
        return await self._call(calls.Info())

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        received: list[int] = []
        for attempt in itertools.count(1):
            missing = request
            if received:  # ask for the tokens that are still missing
                missing = replace(
                    request,
                    prompt_token_ids=request.prompt_token_ids + received,
                    max_tokens=request.max_tokens - len(received),
                    first_index=request.first_index + len(received),
                )
            call = calls.Generate(request=missing, stream=stream)
            client = await self._connect_for(missing.adapter, missing.prompt_token_ids)
            try:
                async with aclosing(client.stream(call)) as chunks:
                    async for chunk in chunks:
                        received += chunk.token_ids
                        if attempt > 1 and chunk.timings is not None:  # they leave out the time before the death
                            chunk = replace(chunk, timings=None)
                        yield chunk
                return
            except ProcessError as error:
                note_death(f"`{call.method}`", attempt, self._attempts, error)

    async def generate_whole(self, request: GenerateRequest) -> TokenChunk:
        # Nothing arrives before the end, so after a death the request is simply made again.
        call, attempt = calls.Generate(request=request, stream=False), 0

        def connect() -> Awaitable[RpcClient]:
            return self._connect_for(request.adapter, request.prompt_token_ids)

        async def ask(client: RpcClient) -> TokenChunk:
            nonlocal attempt
            attempt += 1
            return await client.call(call)

        chunk = await retry_on_process_death(connect, ask, f"`{call.method}`", self._attempts)
        return chunk if attempt == 1 else replace(chunk, timings=None)  # they leave out the time before the death

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        return await self._call(calls.LoadAdapter(name=name, path=path))

    async def prepare_weights(self, name: str, path: Path) -> None:
        """Do the part of `load_adapter` that is possible while requests run.

        It is for an engine whose `load_adapter` waits until no request runs.
        """
        await self._call(calls.PrepareWeights(name=name, path=path))

    async def unload_adapter(self, name: str) -> None:
        await self._call(calls.UnloadAdapter(name=name))

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        call = calls.Score(token_ids=token_ids, adapter=adapter)
        return await self._call(call, lambda: self._connect_for(adapter, token_ids))

    async def stats(self) -> dict[str, float]:
        return await self._call(calls.Stats())

    async def sleep(self) -> None:
        await self._call(calls.Sleep())

    async def wake(self) -> None:
        await self._call(calls.Wake())

    def _connect_for(self, adapter: str | None, token_ids: list[int]) -> Awaitable[RpcClient]:
        """Connect to a process for a request that names `adapter` and begins with `token_ids`."""
        return self._connect()

    async def _call(self, call: Call[Result], connect: Connect | None = None) -> Result:
        return await retry_on_process_death(
            connect or self._connect, lambda client: client.call(call), f"`{call.method}`", self._attempts
        )
