"""The hub of live events, with requests that are moved by hand."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from art.engine import Timings
from art.gateway.live import MAX_ENDED, LiveHub, LiveRequest
from art.protocol.live import FindingMade, LiveEvent
from tests.support.gateway import user

TEXTS = {1: b"a", 2: b"b", 3: b"\xc3", 4: b"\xa9"}


def quick(**limits: int) -> LiveHub:
    return LiveHub(flush_s=0.005, **limits)


def make(number: int = 1, project: str = "p", *, is_streamed: bool = True) -> LiveRequest:
    tokenizer = SimpleNamespace(token_bytes=TEXTS)
    turn = SimpleNamespace(
        rollout_id=None, scenario=None, messages=[user("hi" * 999)], prompt_token_ids=[0] * 5, max_tokens=9,
        renderer=SimpleNamespace(tokenizer=tokenizer),
    )  # fmt: skip
    completion = SimpleNamespace(
        exchange_id=f"e{number}", token_ids=[], timings=None, num_cached_tokens=2, finish_reason=None
    )
    policy = SimpleNamespace(project=project, name="m", policy_version=3)
    return LiveRequest(turn, policy, completion, is_streamed)  # type: ignore[arg-type]


def sample(hub: LiveHub, request: LiveRequest, *tokens: int) -> None:
    request.completion.token_ids.extend(tokens)
    hub.sampled(request)


class Viewer:
    """A viewer that takes its events one by one. It reads from the hub only when it has none left."""

    def __init__(self, hub: LiveHub, project: str | None) -> None:
        self._batches = hub.watch(project)
        self._left: list[LiveEvent] = []

    async def __anext__(self) -> LiveEvent:
        while not self._left:
            self._left = list(await anext(self._batches))
        return self._left.pop(0)

    async def aclose(self) -> None:
        await self._batches.aclose()


async def take(viewer: Viewer, count: int) -> list[LiveEvent]:
    async with asyncio.timeout(60):
        return [await anext(viewer) for _ in range(count)]


def kinds(events: list[LiveEvent]) -> list[str]:
    return [event.data.kind for event in events]


async def test_a_viewer_follows_a_request_from_its_start_to_its_end() -> None:
    hub, request = quick(), make()
    stream = Viewer(hub, "p")
    assert kinds(await take(stream, 1)) == ["reset"]
    with hub.followed(request):
        (started,) = await take(stream, 1)
        assert started.data.last_text == "hi" * 300
        sample(hub, request, 1, 3)  # the second is half of a character
        sample(hub, request, 4)
        (tokens,) = await take(stream, 1)
        assert [(piece.id, piece.text, piece.num_tokens) for piece in tokens.data.pieces] == [("e1", "aé", 3)]
        sample(hub, request, 2)
        request.completion.finish_reason = "stop"
        request.completion.timings = Timings(queue_s=0.5, prefill_s=0.25, decode_s=1.0)
    tokens, ended = await take(stream, 2)
    assert [piece.text for piece in tokens.data.pieces] == ["b"]
    assert (ended.data.outcome, ended.data.num_tokens, ended.data.num_cached_tokens) == ("stop", 4, 2)
    assert (ended.data.queue_s, ended.data.prefill_s, ended.data.decode_s) == (0.5, 0.25, 1.0)
    assert not hub.running
    assert ("p", "m") in hub.answered


async def test_a_late_viewer_gets_the_running_requests_with_their_text_and_the_newest_ended_ones() -> None:
    hub, ended, running, plain = quick(), make(1), make(2), make(3, is_streamed=False)
    with hub.followed(ended):
        ended.completion.finish_reason = "length"
    with ExitStack() as stack:
        stack.enter_context(hub.followed(running))
        stack.enter_context(hub.followed(plain))
        running.completion.token_ids.extend([1, 2, 3])  # a client streams it, nobody watches
        stream = Viewer(hub, "p")
        events = await take(stream, 4)
        assert kinds(events) == ["reset", "request_started", "request_started", "request_ended"]
        assert (events[1].data.text, events[1].data.num_tokens, events[1].data.is_text_known) == ("ab", 3, True)
        assert (events[2].data.text, events[2].data.is_text_known) == ("", False)
        sample(hub, running, 4)
        (tokens,) = await take(stream, 1)
        assert [piece.text for piece in tokens.data.pieces] == ["é"]


async def test_requests_that_fail_or_are_cancelled_say_so() -> None:
    hub, stream = quick(), None
    stream = Viewer(hub, None)
    await take(stream, 1)
    with pytest.raises(ValueError), hub.followed(make(1)):
        raise ValueError("no\nstack")
    with pytest.raises(asyncio.CancelledError), hub.followed(make(2)):
        raise asyncio.CancelledError
    _, failed, _, cancelled = await take(stream, 4)
    assert (failed.data.outcome, failed.data.error) == ("failed", "no")
    assert (cancelled.data.outcome, cancelled.data.error) == ("cancelled", None)
    assert not hub.answered


async def test_a_stop_string_leaves_the_decoding_time_to_the_clock() -> None:
    hub, request = quick(), make()
    with hub.followed(request):
        request.completion.timings = Timings(queue_s=0.0, prefill_s=0.0)
        await asyncio.sleep(0.01)
        request.completion.finish_reason = "stop"
    (ended,) = hub.ended
    assert ended.decode_s == pytest.approx(ended.total_s)
    assert ended.total_s >= 0.01


async def test_viewers_see_their_project_only() -> None:
    hub = quick()
    mine, all_of_them = Viewer(hub, "p"), Viewer(hub, None)
    await take(mine, 1)
    await take(all_of_them, 1)
    hub.publish("q", FindingMade(project="q", name="m", step=1, text="secret"))
    with hub.followed(make(7, "q")):
        assert kinds(await take(all_of_them, 2)) == ["finding", "request_started"]
    hub.publish("p", FindingMade(project="p", name="m", step=1, text="mine"))
    (event,) = await take(mine, 1)
    assert event.data.text == "mine"
    late = Viewer(hub, "p")
    assert kinds(await take(late, 1)) == ["reset"]


async def test_only_the_newest_ended_requests_are_kept() -> None:
    hub = quick()
    hub.publish("p", FindingMade(project="p", name="m", step=1, text="x"))  # nobody watches
    for number in range(300):
        with hub.followed(make(number)) as request:
            sample(hub, request, 1)
    assert [ended.id for ended in hub.ended] == [f"e{number}" for number in range(300 - MAX_ENDED, 300)]
    assert kinds(await take(Viewer(hub, "p"), 1 + MAX_ENDED)) == ["reset"] + ["request_ended"] * MAX_ENDED


async def test_a_viewer_that_reconnects_starts_over_from_what_runs() -> None:
    hub = quick()
    stream = Viewer(hub, "p")
    await take(stream, 1)
    with hub.followed(make()):
        await take(stream, 1)
        await stream.aclose()
        assert hub.num_viewers == 0
        again = Viewer(hub, "p")
        assert kinds(await take(again, 2)) == ["reset", "request_started"]


async def test_a_slow_viewer_starts_over_from_what_runs() -> None:
    hub, request = quick(max_events=10), make()
    slow, fast = Viewer(hub, "p"), Viewer(hub, "p")
    await take(slow, 1)
    await take(fast, 1)
    with hub.followed(request):
        assert kinds(await take(slow, 1)) == kinds(await take(fast, 1)) == ["request_started"]
        sample(hub, request, 1)
        assert kinds(await take(slow, 1)) == kinds(await take(fast, 1)) == ["tokens"]
        for _ in range(25):
            sample(hub, request, 1, 2)
            assert kinds(await take(fast, 1)) == ["tokens"]
        reset, started = await take(slow, 2)
        assert reset.data.kind == "reset"
        assert (started.data.id, started.data.num_tokens, started.data.text) == ("e1", 51, "a" + "ab" * 25)
        sample(hub, request, 2)
        assert kinds(await take(slow, 1)) == ["tokens"]


async def test_a_viewer_hears_that_nothing_happens() -> None:
    hub = LiveHub(heartbeat_s=0.01)
    stream = hub.watch("p")
    async with asyncio.timeout(60):
        assert kinds(await anext(stream)) == ["reset"]
        assert await anext(stream) == []
        hub.publish("p", FindingMade(project="p", name="m", step=1, text="x"))
        while not (events := await anext(stream)):
            pass
    assert kinds(events) == ["finding"]
