"""The process beside a vLLM server: `python -m art.runtime.children.vllm_child --fd N`.

It starts the server and ends with it, so that the supervision of this process covers both; or it talks to servers that
run already. It also keeps the HTTP and JSON of vLLM off the event loop of the ART server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from art.engines.vllm.start import Launch, VllmServer, start_engine
from art.engines.vllm.vllm_engine import MergedVllmEngine, VllmEngine
from art.errors import ArtError, InvalidRequestError, ProcessError
from art.protocol import calls
from art.protocol.calls import VLLM_CALLS, Call, decode_engine_call
from art.runtime.children.child import Child, child_from_argv, rss_bytes
from art.runtime.children.merged_weights import MergedWeights

logger = logging.getLogger(__name__)

WATCH_S = 2.0
"""Time between two checks of whether the vLLM server makes progress."""
DEATH_NOTICE_S = 10.0
"""Longest time from the first request that fails because a vLLM server is dying to the end of that server."""


class VllmChild:
    """Serves the calls of the ART server by a vLLM engine, each call in its own asyncio task."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._engine: VllmEngine | None = None
        self._server: VllmServer | None = None
        self._merged: MergedWeights | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.handlers: Mapping[type[Call[Any]], Callable[[int, Any], Awaitable[None]]] = {
            calls.StartVllm: self._start,
            calls.Info: lambda call_id, call: self._reply(call_id, self._started.info()),
            calls.Generate: self._generate,
            calls.Score: lambda call_id, call: self._reply(call_id, self._started.score(call.token_ids, call.adapter)),
            calls.LoadAdapter: self._load_adapter,
            calls.PrepareWeights: self._prepare_weights,
            calls.UnloadAdapter: lambda call_id, call: self._reply(call_id, self._started.unload_adapter(call.name)),
            calls.Stats: lambda call_id, call: self._reply(call_id, self._started.stats()),
            calls.Sleep: lambda call_id, call: self._reply(call_id, self._started.sleep()),
            calls.Wake: lambda call_id, call: self._reply(call_id, self._started.wake()),
        }

    async def run(self) -> None:
        """Serve until the parent or the vLLM server ends, which also ends this process."""
        loop = asyncio.get_running_loop()

        def pump() -> None:
            while True:
                loop.call_soon_threadsafe(self._take, self._child.inbox.get())

        threading.Thread(target=pump, name="pump", daemon=True).start()
        await self._watch()

    def _take(self, frame: dict[str, Any]) -> None:
        if "cancel" in frame:
            if (call := self._calls.get(frame["cancel"])) is not None:
                call.cancel()
            return
        call_id: int = frame["id"]
        call = asyncio.get_running_loop().create_task(self._answer(call_id, frame))
        self._calls[call_id] = call
        call.add_done_callback(lambda _: self._calls.pop(call_id, None))

    async def _answer(self, call_id: int, frame: dict[str, Any]) -> None:
        try:
            call = decode_engine_call(VLLM_CALLS, frame)
            await self.handlers[type(call)](call_id, call)
        except Exception as error:  # the caller gets it; one bad call must not end the others
            if isinstance(error, ProcessError) and self._server is not None:
                # If the server is dying, this process ends within this time, and the caller waits for the next one.
                await asyncio.sleep(DEATH_NOTICE_S)
            if not isinstance(error, ArtError):
                logger.exception("%s failed", frame["method"])
            self._child.socket.fail(call_id, error)

    async def _reply(self, call_id: int, result: Awaitable[Any]) -> None:
        self._child.socket.reply(call_id, await result)

    @property
    def _started(self) -> VllmEngine:
        if self._engine is None:
            raise ProcessError("the engine has no model yet: call `start_vllm` first")
        return self._engine

    async def _start(self, call_id: int, call: calls.StartVllm) -> None:
        self._engine, self._server = await start_engine(
            call.model,
            call.config,
            Launch(call.lora_rank, call.python, sleeps=call.sleeps, memory_bytes=call.memory_bytes),
        )
        if self._server is not None:
            task = asyncio.get_running_loop().create_task(self._end_with(self._server))
            self._tasks.add(task)
        info = await self._engine.info()
        if call.work_dir is not None:
            self._merged = MergedWeights(call.model, info.dtype, call.work_dir)
        self._child.socket.reply(call_id, info)

    async def _end_with(self, server: VllmServer) -> None:
        death = await server.death()
        logger.error("%s", death)
        sys.stderr.flush()
        os._exit(1)  # calls that wait must not be answered: the parent lets them wait for the next server

    async def _generate(self, call_id: int, call: calls.Generate) -> None:
        async with contextlib.aclosing(self._started.generate(call.request, stream=call.stream)) as chunks:
            async for chunk in chunks:
                self._child.socket.reply(call_id, chunk, last=chunk.finish_reason is not None)

    async def _load_adapter(self, call_id: int, call: calls.LoadAdapter) -> None:
        engine = self._started
        if self._merged is None or not isinstance(engine, MergedVllmEngine):
            self._child.socket.reply(call_id, await engine.load_adapter(call.name, call.path))
            return
        weights = await asyncio.to_thread(self._merged.prepare, call.name, call.path)
        await engine.replace_weights(call.name, weights.folder)
        await asyncio.to_thread(self._merged.clear)
        self._child.socket.reply(call_id, weights.info)

    async def _prepare_weights(self, call_id: int, call: calls.PrepareWeights) -> None:
        if self._merged is None:
            raise InvalidRequestError("`prepare_weights` is for an engine that was started with `work_dir`")
        await asyncio.to_thread(self._merged.prepare, call.name, call.path)
        self._child.socket.reply(call_id, None)

    async def _watch(self) -> None:
        """Keep the heartbeat informed whether requests run and tokens come."""
        progress = Progress()
        while True:
            await asyncio.sleep(WATCH_S)
            if self._server is not None:
                self._child.details = progress.describe(self._server.pid)
            if self._engine is None:
                self._child.tick("starting vLLM")
            elif self._engine.asleep:
                self._child.tick("asleep")  # its requests are paused on purpose
            else:
                is_idle = not self._calls
                if is_idle:
                    self._child.tick("idle")
                if not is_idle or self._server is not None:  # ART does not report on servers that it has not started
                    with contextlib.suppress(ProcessError, TimeoutError):
                        async with asyncio.timeout(WATCH_S):
                            stats = await self._engine.stats()
                        if progress.add(stats) and not is_idle:
                            self._child.tick("sampling")
                if is_idle:
                    progress.expect()


class Progress:
    """Tells whether vLLM has computed anything since the last check."""

    def __init__(self) -> None:
        self._done = 0.0
        self._last: float | None = None
        self._stats: dict[str, float] = {}
        self._is_new = True

    def add(self, stats: dict[str, float]) -> bool:
        """Take in new counters; return whether they show progress."""
        done = stats["generated_tokens"] + stats["prefill_tokens"]
        moved, is_new = done != self._done, self._is_new
        self._done, self._stats, self._is_new = done, stats, False
        if moved:
            self._last = time.monotonic()
        return moved or is_new

    def expect(self) -> None:
        """Count the next check as progress, because nothing runs now and the next request is a new one."""
        self._is_new = True

    def describe(self, pid: int) -> dict[str, Any]:
        """Describe the memory and the last progress of vLLM's own processes, for heartbeats."""
        details: dict[str, Any] = {"rss_bytes": rss_bytes(pid)}
        if self._last is not None:
            details["progress_s"] = time.monotonic() - self._last
            names = ("running", "waiting", "kv_cache_usage", "generated_tokens")
            details |= {name: self._stats[name] for name in names}
        return {"vllm": details}


def main() -> None:
    child = child_from_argv("vllm_child")
    asyncio.run(VllmChild(child).run())


if __name__ == "__main__":
    main()
