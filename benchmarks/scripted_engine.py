"""Engines that answer after a fixed time and compute nothing, for `benchmarks.cluster`.

    python -m benchmarks.scripted_engine --server HOST:PORT --count 8     dial a server's door, as workers do
    python -m benchmarks.scripted_engine --fd N                           one engine, over a socket pair

Each computes `SEATS` answers at once, and remembers prompts by whole blocks, as an engine's prefix cache does.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from typing import Any

from art.engine import EngineInfo
from art.engines.routing import prefix_hashes
from art.protocol.rpc import HEARTBEAT_ID, FrameBuffer, encode_frame
from art.worker.agent import WorkerAgent
from art.worker.door import worker_key

SEATS, ANSWER_S, BLOCK = 16, 0.5, 32


class ScriptedEngine:
    """Answers the calls that come through one connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._seats = asyncio.Semaphore(SEATS)
        self._known: set[bytes] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        beating = asyncio.create_task(self._beat())
        frames = FrameBuffer()
        try:
            while data := await reader.read(2**18):
                for frame in frames.feed(data):
                    if "method" in frame:
                        task = asyncio.create_task(self._answer(frame))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._send(HEARTBEAT_ID, {"doing": "idle", "since_s": 0.0, "rss_bytes": 0})
            await asyncio.sleep(1.0)

    async def _answer(self, frame: dict[str, Any]) -> None:
        if frame["method"] == "info":
            info = EngineInfo(vocab_size=1000, max_context=32768, dtype="float32", device="none", max_running=SEATS)
            self._send(frame["id"], info)
            return
        request = frame["params"]["request"]
        async with self._seats:
            hashes = prefix_hashes(str(request["adapter"]), request["prompt_token_ids"])
            cached = next((i for i in range(len(hashes), 0, -1) if hashes[i - 1] in self._known), 0)
            self._known.update(hashes)
            await asyncio.sleep(ANSWER_S)
        tokens = [1] * 8
        chunk = {
            "token_ids": tokens,
            "logprobs": [-0.5] * 8,
            "finish_reason": "length",
            "num_cached_tokens": cached * BLOCK,
        }
        self._send(frame["id"], chunk)

    def _send(self, call_id: int, result: Any) -> None:
        self._writer.write(encode_frame({"id": call_id, "result": result, "last": True}))


class ScriptedWorker(WorkerAgent):
    """A worker that runs a scripted engine in place of a program."""

    async def _run_program(
        self, order: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await ScriptedEngine(writer).serve(reader)


async def dial(address: str, count: int) -> None:
    await asyncio.gather(*(ScriptedWorker("engine", address, worker_key()).run() for _ in range(count)))


async def serve_socket(number: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=number))
    await ScriptedEngine(writer).serve(reader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--fd", type=int)
    args = parser.parse_args()
    asyncio.run(dial(args.server, args.count) if args.server else serve_socket(args.fd))


if __name__ == "__main__":
    main()
