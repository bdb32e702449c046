"""The loop of the engine's process, with a scripted connection and a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from art.config import EngineConfig
from art.engine import TokenChunk
from art.engines.torch.embedded import Output
from art.engines.torch.pool import EnginePool
from art.errors import ArtError, NotFoundError
from art.worker.engine_child import MAX_FAILED_STEPS, EngineChild

REQUEST = {
    "request_id": "x",
    "adapter": None,
    "prompt_token_ids": [1],
    "max_tokens": 2,
    "stop_token_ids": [],
    "seed": 0,
}


class Done(Exception):
    """The script is over."""


class RecordingSocket:
    def __init__(self, frames: list[dict[str, Any]]) -> None:
        self.frames = frames
        self.replies: list[list[tuple[int, Any, bool]]] = []
        self.failures: list[tuple[int, BaseException]] = []

    def arrived(self) -> list[dict[str, Any]]:
        return self.frames

    def reply_many(self, replies: list[tuple[int, Any, bool]]) -> None:
        self.replies.append(replies)

    def fail(self, call_id: int, error: BaseException) -> None:
        self.failures.append((call_id, error))


class ScriptedChild:
    def __init__(self, *frames: dict[str, Any]) -> None:
        self.socket = RecordingSocket(list(frames))
        self.doing: list[str] = []

    def read(self) -> dict[str, Any]:
        if not self.socket.frames:
            raise Done
        return self.socket.frames.pop(0)

    def tick(self, doing: str) -> None:
        self.doing.append(doing)


class ScriptedEngine:
    """Each step gives the next item: outputs, or an error to raise."""

    def __init__(self, *steps: list[Output] | Exception) -> None:
        self.steps = list(steps)
        self.running: list[str] = []
        self.cancelled: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def submit(self, request: Any, *, stream: bool) -> None:
        if request.adapter is not None:
            raise NotFoundError("no such adapter")
        self.running.append(request.request_id)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def unload_adapter(self, name: str, on_done: Any) -> None:
        on_done()

    def step(self) -> list[Output]:
        outcome = self.steps.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        self.running = [r for r in self.running if r not in {o.request_id for o in outcome if finishes(o)}]
        return outcome

    def abort_all(self, error: ArtError) -> list[Output]:
        outputs = [Output(r, error=error) for r in self.running]
        self.running = []
        return outputs


def finishes(output: Output) -> bool:
    return output.chunk is None or output.chunk.finish_reason is not None


def generate(call_id: int, **changes: object) -> dict[str, Any]:
    return {"id": call_id, "method": "generate", "params": {"request": REQUEST | changes, "stream": True}}


def chunk(call_id: int, reason: str | None = None) -> Output:
    return Output(str(call_id), chunk=TokenChunk(token_ids=[5], logprobs=[-1.0], finish_reason=reason))


def serve(child: ScriptedChild, engine: ScriptedEngine) -> RecordingSocket:
    server = EngineChild(child)
    server._pool = EnginePool(engine, "base", EngineConfig())
    with pytest.raises(Done):
        server.run()
    return child.socket


def test_a_step_is_answered_in_one_write() -> None:
    child = ScriptedChild(generate(1), generate(2), {"cancel": 7})
    engine = ScriptedEngine([chunk(1), chunk(2)], [chunk(1, "stop"), chunk(2, "length")])
    socket = serve(child, engine)
    assert [[(i, r.token_ids, last) for i, r, last in batch] for batch in socket.replies] == [
        [(1, [5], False), (2, [5], False)],
        [(1, [5], True), (2, [5], True)],
    ]
    assert engine.cancelled == ["7"]
    assert child.doing == ["idle", "step", "step", "idle"]


def test_one_bad_request_fails_alone() -> None:
    child = ScriptedChild(
        generate(1, adapter="no"), generate(2), {"id": 3, "method": "dance", "params": {}}, generate(4, unknown=1)
    )
    socket = serve(child, ScriptedEngine([chunk(2, "stop")]))
    assert [i for i, _ in socket.failures] == [1, 3, 4]
    assert isinstance(socket.failures[0][1], NotFoundError)
    assert [[i for i, _, _ in batch] for batch in socket.replies] == [[2]]


def test_a_failing_step_fails_its_requests_and_the_loop_lives_on() -> None:
    child = ScriptedChild(generate(1), generate(2))
    engine = ScriptedEngine(RuntimeError("out of memory"))
    socket = serve(child, engine)
    assert [i for i, _ in socket.failures] == [1, 2]
    assert "out of memory" in str(socket.failures[0][1])


def test_a_device_that_fails_for_ever_ends_the_process() -> None:
    child = ScriptedChild(generate(1))
    server = EngineChild(child)
    engine = ScriptedEngine(*[RuntimeError("dead")] * MAX_FAILED_STEPS)
    engine.abort_all = lambda error: []  # type: ignore[method-assign]  # more requests keep coming
    server._pool = EnginePool(engine, "base", EngineConfig())
    with pytest.raises(RuntimeError, match="dead"):
        server.run()
    assert engine.steps == []


def test_calls_before_start_are_refused() -> None:
    child = ScriptedChild({"id": 1, "method": "stats", "params": {}})
    with pytest.raises(Done):
        EngineChild(child).run()
    assert "call `start_engine` first" in str(child.socket.failures[0][1])
