"""What large requests have freed goes back to the system, once for many of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from art.gateway.workers import INLINE, Workers
from art.server.bodies import memory

PROGRAM = """
import sys
from art.server.bodies.memory import keep_little

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

if sys.argv[1] == "keep little":
    keep_little()
bytearray(30 * 2**20)  # glibc takes this as a sign to keep blocks of that size in future
before = resident_mib()
blocks = [b"x" * (2**20) for _ in range(200)]
last = b"y" * 2**19  # at the end of the heap, so that the blocks before it cannot go back by themselves
del blocks
print(resident_mib() - before)
"""


class Library:
    """Counts what a real C library would do."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def malloc_trim(self, pad: int) -> None:
        self.threads.append(threading.get_ident())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


async def test_many_large_requests_share_one_return(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(memory, "_glibc", lambda: library)
    monkeypatch.setattr(memory, "PAUSE_S", 0.05)
    memory.return_memory(memory.LARGE_BYTES - 1)
    await asyncio.sleep(0.2)
    assert library.threads == []
    for _ in range(5):
        memory.return_memory(memory.LARGE_BYTES)
    await until(lambda: len(library.threads) >= 1)
    await asyncio.sleep(0.2)
    assert len(library.threads) == 1
    assert threading.get_ident() not in library.threads
    memory.return_memory(memory.LARGE_BYTES)
    await until(lambda: len(library.threads) == 2)


@pytest.mark.skipif(memory._glibc() is None, reason="needs glibc")
def test_large_blocks_go_back_at_once() -> None:
    def kept_mib(how: str) -> float:
        return float(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True).stdout)

    assert kept_mib("keep little") < 10
    assert kept_mib("as usual") > 100


async def test_large_work_waits_for_a_thread_and_small_work_does_not() -> None:
    workers, here = Workers(), threading.get_ident()
    assert await workers.run(INLINE, threading.get_ident) == here
    assert await workers.run(INLINE + 1, threading.get_ident) != here
    released = threading.Event()
    huge = [asyncio.create_task(workers.run(2**30, released.wait, 20)) for _ in range(8)]
    await asyncio.sleep(0.05)
    assert await workers.run(INLINE + 1, threading.get_ident) != here  # does not wait for huge work
    huge[-1].cancel()
    released.set()
    results = await asyncio.gather(*huge, return_exceptions=True)
    assert results[:-1] == [True] * 7
    assert isinstance(results[-1], asyncio.CancelledError)
