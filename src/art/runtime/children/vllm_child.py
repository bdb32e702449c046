"""The process beside a vLLM server: `python -m art.runtime.children.vllm_child --fd N`.

It starts the server and ends with it, so that the supervision of `runtime/supervision/process.py` counts for both; or
it talks to servers that run already. It also takes the HTTP and the JSON of vLLM off the ART server's own event loop.
Methods are those of `engine_child`, and three more:

    start            {model, config, lora_rank, python, sleeps, work_dir}   -> EngineInfo
    prepare_weights  {name, path}                -> null; with `weights="merged"`, before a `load_adapter` of the same
    sleep            {}                          -> null, once its memory is free
    wake             {}                          -> null, once it has it again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from art.config import VllmConfig
from art.engine import GenerateRequest
from art.engines.vllm.merged import MergedVllmEngine
from art.engines.vllm.server import VllmServer
from art.engines.vllm.start import start_engine
from art.engines.vllm.vllm_engine import VllmEngine
from art.errors import ArtError, InvalidRequestError, ProcessError
from art.runtime.children.child import Child, child_from_argv, rss_bytes
from art.runtime.children.merged_weights import MergedWeights

logger = logging.getLogger(__name__)

WATCH_S = 2.0
"""Between two looks at whether the server makes progress."""
DEATH_NOTICE_S = 10.0
"""A server fails requests, or breaks their connections, some seconds before it is dead."""


class VllmChild:
    """Maps frames to calls of the engine, each in a task of its own."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._engine: VllmEngine | None = None
        self._server: VllmServer | None = None
        self._merged: MergedWeights | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve for ever; the end of the parent or of the server ends the process."""
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
        call = asyncio.get_running_loop().create_task(self._answer(call_id, frame["method"], frame["params"]))
        self._calls[call_id] = call
        call.add_done_callback(lambda _: self._calls.pop(call_id, None))

    async def _answer(self, call_id: int, method: str, params: dict[str, Any]) -> None:
        try:
            if method == "start":
                self._child.socket.reply(call_id, await self._start(**params))
            elif self._engine is None:
                raise ProcessError(f"`{method}` came before `start`")
            elif method == "generate":
                await self._generate(self._engine, call_id, **params)
            elif (call := self._methods(self._engine).get(method)) is not None:
                self._child.socket.reply(call_id, await call(**params))
            else:
                raise InvalidRequestError(f"unknown method {method!r}")
        except Exception as error:  # the caller is told; one bad call must not end the others
            if isinstance(error, ProcessError) and self._server is not None:
                # If the server is dying, this process ends before that, and the caller waits for the next one.
                await asyncio.sleep(DEATH_NOTICE_S)
            if not isinstance(error, ArtError):
                logger.exception("%s failed", method)
            self._child.socket.fail(call_id, error)

    async def _start(
        self,
        model: str,
        config: dict[str, Any],
        lora_rank: int | None,
        python: str | None,
        sleeps: bool = False,
        work_dir: str | None = None,
    ) -> dict[str, Any]:
        settings = VllmConfig.model_validate(config)
        self._engine, self._server = await start_engine(
            model, settings, lora_rank=lora_rank, python=python, sleeps=sleeps
        )
        if self._server is not None:
            task = asyncio.get_running_loop().create_task(self._end_with(self._server))
            self._tasks.add(task)
        info = await self._engine.info()
        if work_dir is not None:
            self._merged = MergedWeights(model, info.dtype, Path(work_dir))
        return asdict(info)

    async def _end_with(self, server: VllmServer) -> None:
        death = await server.death()
        logger.error("%s", death)
        sys.stderr.flush()
        os._exit(1)  # calls that wait must not be answered: the parent lets them wait for the next server

    async def _generate(self, engine: VllmEngine, call_id: int, request: dict[str, Any], stream: bool) -> None:
        request = request | {"request_id": str(call_id), "stop_token_ids": tuple(request["stop_token_ids"])}
        async with contextlib.aclosing(engine.generate(GenerateRequest(**request), stream=stream)) as chunks:
            async for chunk in chunks:
                self._child.socket.reply(call_id, chunk, last=chunk.finish_reason is not None)

    def _methods(self, engine: VllmEngine) -> dict[str, Callable[..., Awaitable[Any]]]:
        async def load_adapter(name: str, path: str) -> dict[str, Any]:
            if self._merged is None or not isinstance(engine, MergedVllmEngine):
                return asdict(await engine.load_adapter(name, Path(path)))
            weights = await asyncio.to_thread(self._merged.prepare, name, Path(path))
            await engine.replace_weights(name, weights.folder)
            await asyncio.to_thread(self._merged.clear)
            return asdict(weights.info)

        async def prepare_weights(name: str, path: str) -> None:
            if self._merged is None:
                raise InvalidRequestError("`prepare_weights` is for an engine that was started with `work_dir`")
            await asyncio.to_thread(self._merged.prepare, name, Path(path))

        async def info() -> dict[str, Any]:
            return asdict(await engine.info())

        return {
            "info": info,
            "score": engine.score,
            "load_adapter": load_adapter,
            "prepare_weights": prepare_weights,
            "unload_adapter": engine.unload_adapter,
            "stats": engine.stats,
            "sleep": engine.sleep,
            "wake": engine.wake,
        }

    async def _watch(self) -> None:
        """Tell the heartbeat whether work goes on: requests are under way, and tokens come."""
        progress = Progress()
        while True:
            await asyncio.sleep(WATCH_S)
            if self._server is not None:
                self._child.details = progress.describe(self._server.pid)
            if self._engine is None:
                self._child.tick("starting vLLM")
            elif self._engine.asleep:
                self._child.tick("asleep")  # its requests stand still, and are to
            else:
                is_idle = not self._calls
                if is_idle:
                    self._child.tick("idle")
                if not is_idle or self._server is not None:  # of servers that run already nothing is told
                    with contextlib.suppress(ProcessError, TimeoutError):
                        async with asyncio.timeout(WATCH_S):
                            stats = await self._engine.stats()
                        if progress.add(stats) and not is_idle:
                            self._child.tick("sampling")
                if is_idle:
                    progress.expect()


class Progress:
    """Whether vLLM has computed anything since it was last asked."""

    def __init__(self) -> None:
        self._done = 0.0
        self._last: float | None = None
        self._stats: dict[str, float] = {}
        self._is_new = True

    def add(self, stats: dict[str, float]) -> bool:
        done = stats["generated_tokens"] + stats["prefill_tokens"]
        moved, is_new = done != self._done, self._is_new
        self._done, self._stats, self._is_new = done, stats, False
        if moved:
            self._last = time.monotonic()
        return moved or is_new

    def expect(self) -> None:
        """Nothing runs: what comes next counts as progress."""
        self._is_new = True

    def describe(self, pid: int) -> dict[str, Any]:
        """For heartbeats: what vLLM's own processes take, and what they last did."""
        found: dict[str, Any] = {"rss_bytes": rss_bytes(pid)}
        if self._last is not None:
            found["progress_s"] = time.monotonic() - self._last
            found |= {name: self._stats[name] for name in ("running", "waiting", "kv_cache_usage", "generated_tokens")}
        return {"vllm": found}


def main() -> None:
    child = child_from_argv("vllm_child")
    asyncio.run(VllmChild(child).run())


if __name__ == "__main__":
    main()
