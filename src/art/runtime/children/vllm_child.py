"""The process beside a vLLM server: `python -m art.runtime.children.vllm_child --fd N`.

It starts the server and ends with it, so that the supervision of this process covers both; or it talks to servers that
run already. It also keeps the HTTP and JSON of vLLM off the event loop of the ART server.

For an engine that takes no adapters it turns checkpoints into whole models: merged with the base, in another folder. A
full checkpoint is already a whole model, but its folder also has the optimiser, which vLLM would load as weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.engine import AdapterInfo
from art.engines.vllm.adapters import read_adapter
from art.engines.vllm.start import Launch, VllmServer, start_engine
from art.engines.vllm.vllm_engine import MergedVllmEngine, VllmEngine
from art.errors import AdapterError, ArtError, ConfigError, InvalidRequestError, ProcessError
from art.exports.formats import base_folder
from art.exports.merge import INDEX, merge
from art.protocol import calls
from art.protocol.calls import VLLM_CALLS, Call, decode_engine_call
from art.runtime.children.child import Child, child_from_argv, rss_bytes
from art.storage import checkpoints

logger = logging.getLogger(__name__)


NARROW = ("BF16", "F16")
"""Dtypes of safetensors files that are less exact than float32."""


@dataclass(frozen=True, slots=True)
class WholeModel:
    identity: str
    """Identity of the checkpoint that the model was made from."""
    folder: Path
    info: AdapterInfo
    """Its `norm` is `None`, since vLLM cannot report what it holds."""


class MergedWeights:
    """Makes the folder of a whole model from a checkpoint, one at a time. Methods may be called from any thread."""

    def __init__(self, base_model: str, dtype: str, folder: Path) -> None:
        """
        Args:
            dtype: dtype of the engine's weights.
            folder: folder to make, used by nobody else. Files that an earlier process left in it are deleted.
        """
        self._base_model = base_model
        self._dtype = dtype
        self._folder = folder
        self._lock = threading.RLock()
        self._ready: WholeModel | None = None
        self.clear()

    def prepare(self, name: str, checkpoint: Path) -> WholeModel:
        """Make the whole model of `checkpoint`, unless it is the one that was prepared last.

        Raises:
            AdapterError: the checkpoint's files cannot be read, or do not fit the base model.
        """
        with self._lock:
            identity = checkpoints.identify(checkpoint)
            if self._ready is None or self._ready.identity != identity:
                self.clear()
                self._folder.mkdir(parents=True)
                try:
                    info = self._make(name, checkpoint)
                except ConfigError as error:
                    raise AdapterError(f'{name!r} cannot be merged (`weights="merged"`): {error.message}') from error
                self._ready = WholeModel(identity, self._folder, info)
            return self._ready

    def clear(self) -> None:
        """Delete the prepared model from the disk."""
        with self._lock:
            self._ready = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self, name: str, checkpoint: Path) -> AdapterInfo:
        base = base_folder(self._base_model)
        if checkpoints.is_full(checkpoint):
            for file in checkpoint.iterdir():
                if file.name not in (*checkpoints.COMMON_FILES, checkpoints.MANIFEST):
                    (self._folder / file.name).symlink_to(file.resolve())
            return _full_info(name, checkpoint, base)
        info = read_adapter(name, checkpoint)
        if self._dtype == "float32" and (narrow := {kind for _, kind in _tensor_kinds(base)} & {*NARROW}):
            raise ConfigError(
                f"the files of the base model hold {', '.join(sorted(narrow))}, to which merged weights are rounded, "
                'but the engine computes in float32. Set `engine.dtype="bfloat16"`, or `weights="lora"`'
            )
        merge(checkpoint, base, self._folder, lambda done, total: None)
        return info


def _full_info(name: str, checkpoint: Path, base: Path) -> AdapterInfo:
    """Describe a full checkpoint, whose tensors must be some of the base model's, with their shapes."""
    shapes = {key: entry["shape"] for file in _files(base) for key, entry in _head(file).items()}
    held = _head(checkpoint / checkpoints.MODEL_WEIGHTS)
    for key, entry in held.items():
        if key not in shapes:
            raise AdapterError(f"{name!r} has weights {key!r}, which the base model in {base} does not have")
        if entry["shape"] != shapes[key]:
            raise AdapterError(
                f"{name!r}: {key!r} has shape {entry['shape']}, and {shapes[key]} in the base model {base}"
            )
    return AdapterInfo(name=name, num_layers=len(held), rank=0, norm=None)


def _files(base: Path) -> set[Path]:
    """The safetensors files of the model in `base`."""
    if (base / INDEX).is_file():
        return {base / file for file in json.loads((base / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    file = base / checkpoints.MODEL_WEIGHTS
    return {file} if file.is_file() else set()


def _tensor_kinds(base: Path) -> Iterator[tuple[str, str]]:
    """Yield each tensor of the model in `base` with its dtype as safetensors names it."""
    for file in _files(base):
        yield from ((key, entry["dtype"]) for key, entry in _head(file).items())


def _head(file: Path) -> dict[str, Any]:
    """Return the JSON header of a safetensors file, tensors only."""
    with file.open("rb") as reader:
        head: dict[str, Any] = json.loads(reader.read(int.from_bytes(reader.read(8), "little")))
    return {key: entry for key, entry in head.items() if key != "__metadata__"}


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
