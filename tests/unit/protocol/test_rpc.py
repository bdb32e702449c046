"""Both ends of the connection between the server and one of its processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest
import pytest_asyncio

from art.engine import GenerateRequest
from art.errors import ProcessError
from art.protocol.calls import Score, Stats
from art.protocol.rpc import FrameBuffer, RpcClient, RpcServerSocket, encode_frame

REQUEST = GenerateRequest(
    request_id="r", adapter=None, prompt_token_ids=[5, 9], max_tokens=20, stop_token_ids=(), seed=11
)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_calls_between_a_death_and_its_explanation_get_the_explanation(loop: str) -> None:
    """A transport of uvloop is closed by the first write that fails, and the second one raises RuntimeError."""

    async def calls() -> list[object]:
        ours, theirs = socket.socketpair()
        known = asyncio.Event()

        async def explain() -> ProcessError:
            await known.wait()
            return ProcessError("the child died (signal 9)")

        client = await RpcClient(lambda status: None, explain).connect(ours)
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


class Ends:
    """A client, and the other end of its connection, as a child has it."""

    def __init__(self, client: RpcClient, child: RpcServerSocket) -> None:
        self.client, self.child = client, child

    async def read(self) -> dict[str, Any]:
        frame = await asyncio.to_thread(self.child.read)
        assert frame is not None
        return frame


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    ours, theirs = socket.socketpair()
    client = await RpcClient(lambda status: None).connect(ours)
    yield Ends(client, RpcServerSocket(theirs))
    theirs.close()
    await client.close()


async def test_answers_of_one_write_are_read_together(ends: Ends) -> None:
    calls = [asyncio.ensure_future(ends.client.call(Score(token_ids=[1, i], adapter=None))) for i in range(40)]
    frames = [await ends.read() for _ in range(40)]
    ends.child.reply_many([(frame["id"], [-float(frame["params"]["token_ids"][1])], True) for frame in frames])
    assert await asyncio.gather(*calls) == [[-float(i)] for i in range(40)]


async def test_calls_of_one_turn_of_the_loop_go_out_in_one_write() -> None:
    """An idle engine then takes them as one batch."""
    transport = Mock(spec=asyncio.Transport)
    client = RpcClient(lambda status: None)
    client.connection_made(transport)
    calls = [asyncio.ensure_future(client.call(Score(token_ids=[1, i], adapter=None))) for i in range(40)]
    await asyncio.sleep(0.01)
    ((written,),) = (call.args for call in transport.write.call_args_list)
    assert [frame["params"]["token_ids"][1] for frame in FrameBuffer().feed(written)] == [*range(40)]
    client.fail(ProcessError("over"))
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_call_that_is_cancelled_is_cancelled_in_the_child(ends: Ends) -> None:
    call = asyncio.ensure_future(ends.client.call(Stats()))
    asked = await ends.read()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert await ends.read() == {"cancel": asked["id"]}
    ends.child.reply(asked["id"], {})  # too late: nobody waits for it
    later = asyncio.ensure_future(ends.client.call(Stats()))
    ends.child.reply((await ends.read())["id"], {"running": 1.0})
    assert await later == {"running": 1.0}


async def test_what_cannot_be_sent_leaves_no_call(ends: Ends) -> None:
    with pytest.raises(TypeError):
        await ends.client.call(Score(token_ids=[object()], adapter=None))  # type: ignore[list-item]
    assert not ends.client._pending


def test_frames_are_cut_wherever_they_arrive() -> None:
    messages = [{"id": 1, "result": "x" * 300}, {"id": 2, "result": None}, {"cancel": 70_000}]
    data = b"".join(map(encode_frame, messages))
    for size in (1, 2, 3, 5, 7, 64, len(data)):
        buffer = FrameBuffer()
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        assert [one for piece in pieces for one in buffer.feed(piece)] == messages


def test_a_child_can_look_whether_a_frame_has_come() -> None:
    ours, theirs = socket.socketpair()
    child = RpcServerSocket(theirs)
    assert not child.arrived()
    ours.sendall(encode_frame({"cancel": 1}) + encode_frame({"cancel": 2})[:-1])
    assert list(child.arrived()) == [{"cancel": 1}]
    assert child.read() == {"cancel": 1}
    assert not child.arrived()
    ours.sendall(b"}")
    assert child.read() == {"cancel": 2}
    ours.close()
    child.until_hang_up()
    assert not child.arrived()
    assert child.read() is None
