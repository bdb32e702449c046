"""The process beside a vLLM server: `python -m art.worker.vllm_child --fd N`.

It starts the server and ends with it, so that the supervision of this process covers both; or it talks to servers that
run already. It also keeps the HTTP and JSON of vLLM off the event loop of the ART server.

For an engine that takes no adapters it turns checkpoints into whole models: merged with the base, in another folder. A
full checkpoint is already a whole model, but its folder also has the optimiser, which vLLM would load as weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from art.engine import AdapterInfo
from art.engines.vllm.start import VllmServer, start_engine
from art.engines.vllm.vllm_engine import MergedVllmEngine, VllmEngine, read_adapter
from art.errors import AdapterError, ArtError, ConfigError, InvalidRequestError, ProcessError
from art.exports import base_folder, merge
from art.protocol import calls
from art.protocol.calls import VLLM_CALLS, Call, decode_engine_call
from art.storage import checkpoints
from art.worker.child import Child, child_from_argv

logger = logging.getLogger(__name__)


class MergedWeights:
    """Makes the folder of a whole model from a checkpoint, one at a time. Methods may be called from any thread."""

    def __init__(self, base_model: str, folder: Path) -> None:
        """`folder` is used by nobody else. Files that an earlier process left in it are deleted."""
        self._base_model = base_model
        self.folder = folder
        self._lock = threading.RLock()
        self._ready: tuple[str, AdapterInfo] | None = None
        """The prepared model, by the identity of its checkpoint."""
        self.clear()

    def prepare(self, name: str, checkpoint: Path) -> AdapterInfo:
        """Make the whole model of `checkpoint` in `folder`, unless it is the one that was prepared last.

        Returns:
            What the model has. Its `norm` is `None`, since vLLM cannot report what it holds.

        Raises:
            AdapterError: the checkpoint's files cannot be read, or do not fit the base model.
        """
        with self._lock:
            identity = checkpoints.identify(checkpoint)
            if self._ready is None or self._ready[0] != identity:
                self.clear()
                self.folder.mkdir(parents=True)
                try:
                    self._ready = identity, self._make(name, checkpoint)
                except ConfigError as error:
                    raise AdapterError(f'{name!r} cannot be merged (`weights="merged"`): {error.message}') from error
            return self._ready[1]

    def clear(self) -> None:
        """Delete the prepared model from the disk."""
        with self._lock:
            self._ready = None
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self, name: str, checkpoint: Path) -> AdapterInfo:
        if checkpoints.is_full(checkpoint):
            for file in checkpoint.iterdir():
                if file.name not in (*checkpoints.COMMON_FILES, checkpoints.MANIFEST):
                    (self.folder / file.name).symlink_to(file.resolve())
            with safe_open(checkpoint / checkpoints.MODEL_WEIGHTS, "np") as weights:
                return AdapterInfo(name=name, num_layers=len(weights.keys()), rank=0, norm=None)
        info = read_adapter(name, checkpoint)
        merge(checkpoint, base_folder(self._base_model), self.folder, lambda done, total: None)
        return info


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
        self._end: asyncio.Task[None] | None = None
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
        """Serve until the parent or the vLLM server ends, which also ends this process.

        Meanwhile the heartbeat learns whether requests run and tokens come.
        """
        loop = asyncio.get_running_loop()

        def pump() -> None:
            while True:
                loop.call_soon_threadsafe(self._take, self._child.read())

        threading.Thread(target=pump, name="pump", daemon=True).start()
        done_before = None
        while True:
            await asyncio.sleep(WATCH_S)
            if self._engine is None:
                self._child.tick("starting vLLM")
            elif self._engine.asleep:
                self._child.tick("asleep")  # its requests are paused on purpose
            elif not self._calls:
                self._child.tick("idle")
                done_before = None
            else:
                with contextlib.suppress(ProcessError, TimeoutError):
                    async with asyncio.timeout(WATCH_S):
                        stats = await self._engine.stats()
                    done = stats["generated_tokens"] + stats["prefill_tokens"]
                    if done != done_before:
                        self._child.tick("sampling")
                    done_before = done

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
        self._engine, self._server = await start_engine(call)
        if self._server is not None:
            self._end = asyncio.get_running_loop().create_task(self._end_with(self._server))
        info = await self._engine.info()
        if call.work_dir is not None:
            self._merged = MergedWeights(call.model, call.work_dir)
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
        info = await asyncio.to_thread(self._merged.prepare, call.name, call.path)
        await engine.replace_weights(call.name, self._merged.folder)
        await asyncio.to_thread(self._merged.clear)
        self._child.socket.reply(call_id, info)

    async def _prepare_weights(self, call_id: int, call: calls.PrepareWeights) -> None:
        if self._merged is None:
            raise InvalidRequestError("`prepare_weights` is for an engine that was started with `work_dir`")
        await asyncio.to_thread(self._merged.prepare, call.name, call.path)
        self._child.socket.reply(call_id, None)


def main() -> None:
    child = child_from_argv("vllm_child")
    asyncio.run(VllmChild(child).run())


if __name__ == "__main__":
    main()
