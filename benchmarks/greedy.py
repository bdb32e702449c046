"""One client sends one large body: how long do the others wait, and how much memory does the server take?

A server with the tiny model gets bodies of several sizes and shapes, one at a time. Meanwhile two other clients ask for
`/health` and for a chat of four tokens, over and over. A body that is not answered by the deadline ends its server; its
row says so, and what the others had waited until then.

    python -m benchmarks greedy --json greedy.json
    python -m benchmarks greedy --mib 1,7.5 --shapes "one message,empty lists" --source ../before/src

`--source` measures the server of another checkout with the same clients, e.g. the commit before a change.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import logging
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

import art
from benchmarks.bystanders import Waits, bystanders, quantile
from benchmarks.kill_storm import tiny_model
from benchmarks.load_client import Connection
from benchmarks.report import Cell, Result
from benchmarks.serve_load import Server, server

logger = logging.getLogger(__name__)

PROJECT, NAME = "greedy", "agent"
CHAT_PATH = "/v1/chat/completions"
MODEL_PATH = f"/api/models/{PROJECT}/{NAME}"
SMALL_CHAT = {
    "model": f"{PROJECT}/{NAME}", "messages": [{"role": "user", "content": "yes or no?"}], "max_tokens": 4,
}  # fmt: skip
MIB = 2**20
AFTER_S = 1.0
"""The others are timed for this long after the answer too."""
PIECE = 2**18
WORDS = "the agent looks at the board, thinks about it and says what it would do next. "


# -- bodies ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    path: str
    make: Callable[[int], bytes]
    """Makes a body whose size is roughly the given number of bytes."""


def _chat(messages: bytes, more: bytes = b"") -> bytes:
    return b'{"model": "%b", "max_tokens": 4, "messages": [%b]%b}' % (SMALL_CHAT["model"].encode(), messages, more)


def _repeated(item: bytes, size: int) -> bytes:
    return b",".join([item] * (size // (len(item) + 1)))


def _text(size: int) -> bytes:
    return (WORDS * (size // len(WORDS) + 1))[:size].encode()


def _image(size: int) -> bytes:
    data = base64.b64encode(bytes(range(256)) * (size * 3 // 4 // 256))
    part = b'{"type": "image_url", "image_url": {"url": "data:image/png;base64,%b"}}' % data
    return _chat(b'{"role": "user", "content": [%b]}' % part)


def _tools(size: int) -> bytes:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(20)}}
    tool = {"type": "function", "function": {"name": "look", "description": WORDS, "parameters": schema}}
    tools = _repeated(json.dumps(tool).encode(), size)
    return _chat(b'{"role": "user", "content": "hi"}', b', "tools": [%b]' % tools)


def _calls(size: int) -> bytes:
    call = b'{"id": "c", "type": "function", "function": {"name": "look", "arguments": "[%b]"}}'
    answer = b'{"role": "assistant", "content": "", "tool_calls": [%b]}' % (call % _repeated(b"[]", size))
    return _chat(b'{"role": "user", "content": "hi"}, %b, {"role": "user", "content": "hi"}' % answer)


def _trajectories(size: int) -> bytes:
    message = b'{"role": "user", "content": "%b"}, {"role": "assistant", "content": "%b"}' % (_text(150), _text(350))
    return _repeated(b'{"reward": 0.5, "histories": [{"items": [%b]}]}' % b", ".join([message] * 10), size)


def _job(field: bytes, content: bytes) -> bytes:
    return b'{"job_id": "greedy-%d", "%b": [%b]}' % (time.time_ns(), field, content)


def _groups(size: int) -> bytes:
    group = b'{"trajectories": [%b]}' % _trajectories(min(size, 50_000))
    return _job(b"groups", _repeated(group, size))


def _one_text(size: int) -> bytes:
    item = b'{"role": "user", "content": "%b"}' % _text(size)
    return _job(b"groups", b'{"trajectories": [{"histories": [{"items": [%b]}]}]}' % item)


SHAPES = {
    "one message": Shape(CHAT_PATH, lambda size: _chat(b'{"role": "user", "content": "%b"}' % _text(size))),
    "many messages": Shape(CHAT_PATH, lambda size: _chat(_repeated(b'{"role": "user", "content": "hi there"}', size))),
    "empty lists": Shape(CHAT_PATH, lambda size: _chat(_repeated(b"[]", size))),
    "deep": Shape(CHAT_PATH, lambda size: b"[" * (size // 2) + b"]" * (size // 2)),
    "tools": Shape(CHAT_PATH, _tools),
    "lists in arguments": Shape(CHAT_PATH, _calls),
    "base64": Shape(CHAT_PATH, _image),
    "training groups": Shape(f"{MODEL_PATH}/train", _groups),
    "training blanks": Shape(
        f"{MODEL_PATH}/train", lambda size: b'{"job_id": "greedy-1",%b"groups": []}' % (b" " * size)
    ),
    "training number": Shape(f"{MODEL_PATH}/train", lambda size: b'{"groups": 0.%b}' % (b"1" * size)),
    "training string": Shape(
        f"{MODEL_PATH}/train", lambda size: b'{"groups": "%b"}' % ("\u20ac".encode() * (size // 3))
    ),
    "training name": Shape(f"{MODEL_PATH}/train", lambda size: b'{"%b": 1}' % (b"x" * size)),
    "blanks": Shape(CHAT_PATH, lambda size: _chat(b"", b" " * size)),
    "number": Shape(CHAT_PATH, lambda size: _chat(b"", b', "top_p": 0.%b' % (b"1" * size))),
    "name": Shape(CHAT_PATH, lambda size: _chat(b"", b', "%b": 1' % (b"x" * size))),
    "training text": Shape(f"{MODEL_PATH}/train", _one_text),
    "training lists": Shape(f"{MODEL_PATH}/train", lambda size: _job(b"groups", _repeated(b"[]", size))),
    "supervised data": Shape(f"{MODEL_PATH}/train_sft", lambda size: _job(b"trajectories", _trajectories(size))),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--mib", default=None, help="sizes of the bodies (default: 1,7.5,32,60; with --quick 1)")
    group.add_argument("--shapes", default=",".join(SHAPES), help="shapes of the bodies (default: all)")
    group.add_argument(
        "--source",
        type=lambda text: Path(text).resolve(),
        help="folder `src` of another checkout, whose server is measured",
    )
    group.add_argument("--deadline", type=float, default=30.0, help="seconds for each answer (default: 30)")


def run(args: argparse.Namespace) -> Result:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    sizes = [float(word) for word in (args.mib or ("1" if args.quick else "1,7.5,32,60")).split(",")]
    names = [name.strip() for name in args.shapes.split(",")]
    if unknown := sorted(set(names) - SHAPES.keys()):
        raise ValueError(f"unknown shapes {unknown}; there are {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as folder, tiny_model(Path(folder) / "model") as model:
        rows = list(_measure_all(Path(folder), model, [(name, size) for name in names for size in sizes], args))
    return Result(
        summary="One body at a time; meanwhile others ask for /health and for a chat of four tokens.",
        rows=rows,
        notes=[
            "status 0: no answer by the deadline, or the connection was closed",
            "peak: what the server's resident memory rose to, above where it was before the body",
            "clients, server and engine share the machine",
        ],
        clock="wall",
    )


def _measure_all(
    folder: Path, model: Path, cases: list[tuple[str, float]], args: argparse.Namespace
) -> Iterator[dict[str, Cell]]:
    """One row per case. A case that leaves its server stuck is the last one of that server."""
    number = 0
    while cases:
        number += 1
        rows = asyncio.run(_measure_until_stuck(folder / f"data-{number}", model, cases, args))
        yield from rows
        cases = cases[len(rows) :]


async def _measure_until_stuck(
    data_dir: Path, model: Path, cases: list[tuple[str, float]], args: argparse.Namespace
) -> list[dict[str, Cell]]:
    rows = []
    async with server(data_dir, args.source) as one:
        async with art.Backend(one.client.base_url, one.api_key) as backend:
            await art.TrainableModel(name=NAME, project=PROJECT, base_model=str(model)).register(backend)
        for name, size in cases:
            row = await _measure(one, name, size, args.deadline)
            logger.info("%s", row)
            rows.append(row)
            if row["answer s"] == args.deadline:
                one.process.kill()
                break
    return rows


class PeakMemory:
    """Largest resident memory of a process while the body of the `with` runs, read every 10 ms in a thread."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = self.peak = process.memory_info().rss

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.peak = max(self.peak, self._process.memory_info().rss)


async def _measure(one: Server, name: str, size: float, deadline_s: float) -> dict[str, Cell]:
    shape = SHAPES[name]
    body = shape.make(int(size * MIB))
    connections = Connection(one.host, one.port, one.api_key), Connection(one.host, one.port, one.api_key)
    await connections[0].request("/health")
    await connections[1].request(CHAT_PATH, SMALL_CHAT)
    with PeakMemory(one.process) as memory:
        async with bystanders(connections, SMALL_CHAT) as waits:
            await asyncio.sleep(0.2)
            started = time.perf_counter()
            status = await asyncio.to_thread(_post, one, shape, body, deadline_s)
            took_s = time.perf_counter() - started
            await asyncio.sleep(AFTER_S if took_s < deadline_s else 0)
    after = one.process.memory_info().rss
    return {
        "body": name,
        "MiB": size,
        "status": status,
        "answer s": min(took_s, deadline_s),
        **_row(waits),
        "peak MiB": (memory.peak - memory.before) / MIB,
        "peak / body": (memory.peak - memory.before) / len(body),
        "after MiB": (after - memory.before) / MIB,
        "faults": len(waits.faults),
    }


def _row(waits: Waits) -> dict[str, Cell]:
    row: dict[str, Cell] = {}
    for name, values in (("health", waits.health), ("chat", waits.chat)):
        row |= {
            f"{name} p50 ms": quantile(values, 0.5) * 1e3,
            f"{name} p99 ms": quantile(values, 0.99) * 1e3,
            f"{name} max ms": max(values, default=0.0) * 1e3,
        }
    return row


def _post(one: Server, shape: Shape, body: bytes, deadline_s: float) -> int:
    """Send a body and read the status of the answer, in a thread. 0 if there is none."""
    head = (
        f"POST {shape.path} HTTP/1.1\r\nhost: {one.host}\r\nauthorization: Bearer {one.api_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    until = time.monotonic() + deadline_s
    with socket.create_connection((one.host, one.port)) as sock:
        try:
            sock.settimeout(deadline_s)
            sock.sendall(head.encode())
            for start in range(0, len(body), PIECE):
                sock.settimeout(max(0.01, until - time.monotonic()))
                sock.sendall(body[start : start + PIECE])
        except ConnectionError:
            pass  # a refusal may end the connection before all has been sent
        except TimeoutError:
            return 0
        try:
            sock.settimeout(max(0.01, until - time.monotonic()))
            answer = sock.recv(64)
            return int(answer.split()[1]) if answer else 0
        except (OSError, IndexError, ValueError):
            return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["greedy", *sys.argv[1:]])
