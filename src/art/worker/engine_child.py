"""The process of the embedded engine: `python -m art.worker.engine_child --fd N`.

One loop: take the calls that have arrived, let each engine that has work do one step, and send all answers of the steps
in one write. There are several engines where full checkpoints are loaded (`EnginePool`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from art.errors import ArtError, ProcessError
from art.protocol import calls
from art.protocol.calls import ENGINE_CALLS, Call, decode_engine_call
from art.worker.child import Child, child_from_argv, import_transformers

if TYPE_CHECKING:
    from art.engines.torch.embedded import TorchEngine
    from art.engines.torch.pool import EnginePool

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Number of failed steps in a row that ends the process. Some errors of a device last until then."""


class EngineChild:
    """Serves the calls of the server by embedded engines. Engines know a request by the id of its call."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._pool: EnginePool | None = None
        self._replies: list[tuple[int, Any, bool]] = []
        self._failures: list[tuple[int, BaseException]] = []
        self._failed_steps = 0
        self.handlers: Mapping[type[Call[Any]], Callable[[int, Any], None]] = {
            calls.StartEngine: self._start,
            calls.Info: lambda call_id, call: self._reply(call_id, self._started.info()),
            calls.Generate: lambda call_id, call: self._started.submit(call.request, stream=call.stream),
            calls.Score: lambda call_id, call: self._started.submit_score(str(call_id), call.token_ids, call.adapter),
            calls.LoadAdapter: self._load_adapter,
            calls.UnloadAdapter: lambda call_id, call: self._started.unload_adapter(
                call.name, lambda: self._reply(call_id, None)
            ),
            calls.Stats: lambda call_id, call: self._reply(call_id, self._started.stats()),
        }

    def run(self) -> None:
        """Serve until the parent is gone."""
        while True:
            if not self._busy:
                self._child.tick("idle")
                self._handle(self._child.read())
            for _ in range(len(self._child.socket.arrived())):
                self._handle(self._child.read())
            for engine in self._busy:
                self._child.tick("step")
                self._step(engine)
            if self._replies:
                self._child.socket.reply_many(self._replies)
                self._replies = []
            for call_id, error in self._failures:
                self._child.socket.fail(call_id, error)
            self._failures = []

    @property
    def _busy(self) -> list[TorchEngine]:
        return self._pool.busy if self._pool is not None else []

    @property
    def _started(self) -> EnginePool:
        if self._pool is None:
            raise ProcessError("the engine has no model yet: call `start_engine` first")
        return self._pool

    def _handle(self, frame: dict[str, Any]) -> None:
        if "cancel" in frame:
            if self._pool is not None:
                self._pool.cancel(str(frame["cancel"]))
            return
        call_id: int = frame["id"]
        try:
            call = decode_engine_call(ENGINE_CALLS, frame)
            self.handlers[type(call)](call_id, call)
        except Exception as error:  # the caller gets it; one bad call must not end the others
            if not isinstance(error, ArtError):
                logger.exception("%s failed", frame["method"])
            self._failures.append((call_id, error))

    def _start(self, call_id: int, call: calls.StartEngine) -> None:
        self._child.tick("loading the model")
        import_transformers()  # takes seconds: not before the connection exists and heartbeats flow
        from art.engines.torch.pool import EnginePool

        self._pool = EnginePool.load(call.model, call.config, call.quantization)
        self._reply(call_id, self._pool.info())

    def _load_adapter(self, call_id: int, call: calls.LoadAdapter) -> None:
        self._child.tick("loading weights")
        self._reply(call_id, self._started.load_adapter(call.name, call.path))

    def _reply(self, call_id: int, result: Any, *, last: bool = True) -> None:
        self._replies.append((call_id, result, last))

    def _step(self, engine: TorchEngine) -> None:
        """Let an engine do one step, and keep its answers for the next write."""
        try:
            outputs = engine.step()
            self._failed_steps = 0
        except Exception as error:  # the requests of this step fail; the engine lives on
            logger.exception("an engine step failed")
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            outputs = engine.abort_all(ArtError(f"the engine failed on this batch: {type(error).__name__}: {error}"))
        for output in outputs:
            call_id = int(output.request_id)
            if output.error is not None:
                self._failures.append((call_id, output.error))
            elif output.chunk is not None:
                self._reply(call_id, output.chunk, last=output.chunk.finish_reason is not None)
            else:
                self._reply(call_id, output.logprobs)


def main() -> None:
    EngineChild(child_from_argv("engine_child")).run()


if __name__ == "__main__":
    main()
