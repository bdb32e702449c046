"""The parent's end of a connection whose child is gone."""

from __future__ import annotations

import asyncio
import socket

import pytest

from art.errors import ProcessError
from art.protocol.calls import Stats
from art.protocol.rpc import RpcClient


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_calls_between_a_death_and_its_explanation_get_the_explanation(loop: str) -> None:
    """A transport of uvloop is closed by the first write that fails, and the second one raises RuntimeError."""

    async def calls() -> list[object]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        known = asyncio.Event()

        async def explain() -> ProcessError:
            await known.wait()
            return ProcessError("the child died (signal 9)")

        client = RpcClient(reader, writer, lambda status: None, explain)
        theirs.close()
        waiting = []
        for _ in range(4):
            waiting.append(asyncio.ensure_future(client.call(Stats())))
            await asyncio.sleep(0.05)
        assert client.closed, "nobody new is sent there"
        cancelled = waiting.pop()
        cancelled.cancel()
        await asyncio.sleep(0.05)
        known.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        await client.close()
        return [*outcomes, cancelled.cancelled()]

    with asyncio.Runner(loop_factory=pytest.importorskip(loop).new_event_loop) as runner:
        *outcomes, was_cancelled = runner.run(calls())
    assert [str(outcome) for outcome in outcomes] == ["the child died (signal 9)"] * 3
    assert was_cancelled is True


async def test_calls_of_one_turn_of_the_loop_go_out_together() -> None:
    class Writer:
        def __init__(self) -> None:
            self.writes: list[bytes] = []

        def write(self, data: bytes) -> None:
            self.writes.append(data)

    writer = Writer()
    client = RpcClient(asyncio.StreamReader(), writer, lambda status: None)  # type: ignore[arg-type]
    waiting = [asyncio.ensure_future(client.call(Stats())) for _ in range(64)]
    await asyncio.sleep(0.01)
    assert len(writer.writes) == 1
    assert writer.writes[0].count(b'"method":"stats"') == 64
    for call in waiting[:2]:
        call.cancel()
    await asyncio.sleep(0.01)
    assert len(writer.writes) == 2
    assert writer.writes[1].count(b'"cancel"') == 2
    client.fail(ProcessError("over"))
    await asyncio.gather(*waiting, return_exceptions=True)
    client._task.cancel()
