"""The embedded engine's process: `python -m art.runtime.children.engine_child --fd N`.

One loop: take what has arrived, let each engine that has work do one step, answer everything that the steps brought in
one write. There are several engines where full checkpoints are loaded (`EnginePool`). Methods:

    start           {model, config}           -> EngineInfo; once, before all others
    info            {}                        -> EngineInfo
    generate        {request, stream}         -> TokenChunk ... , the last one with `last`
    score           {token_ids, adapter}      -> log-probs
    load_adapter    {name, path}              -> AdapterInfo
    unload_adapter  {name}                    -> null, once its last request has ended
    stats           {}                        -> counters and gauges
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art.config import EngineConfig
from art.engine import GenerateRequest, TokenChunk
from art.errors import ArtError, InvalidRequestError, ProcessError
from art.runtime.children.child import Child, child_from_argv

if TYPE_CHECKING:
    from art.engines.torch.embedded import Output, TorchEngine
    from art.engines.torch.pool import EnginePool

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row that may fail: some errors of a device are for ever, and only a new process helps."""


class EngineChild:
    """Maps frames to engines and their outputs to replies. Requests are known to the engines by their call id."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._pool: EnginePool | None = None
        self._replies: list[tuple[int, Any, bool]] = []
        self._failures: list[tuple[int, BaseException]] = []
        self._failed_steps = 0

    def run(self) -> None:
        """Serve until the parent is gone."""
        inbox = self._child.inbox
        while True:
            if not self._busy:
                self._child.tick("idle")
                self._handle(inbox.get())
            while not inbox.empty():
                self._handle(inbox.get())
            for engine in self._busy:
                self._child.tick("step")
                self._step(engine)
            self._flush()

    @property
    def _busy(self) -> list[TorchEngine]:
        return self._pool.busy if self._pool is not None else []

    def _handle(self, frame: dict[str, Any]) -> None:
        if "cancel" in frame:
            if self._pool is not None:
                self._pool.cancel(str(frame["cancel"]))
            return
        call_id, method, params = frame["id"], frame["method"], frame["params"]
        try:
            if method == "start":
                self._child.tick("loading the model")
                self._replies.append((call_id, self._start(**params), True))
            else:
                self._call(call_id, method, params)
        except Exception as error:  # the caller is told; one bad call must not end the others
            if not isinstance(error, ArtError):
                logger.exception("%s failed", method)
            self._failures.append((call_id, error))

    def _start(self, model: str, config: dict[str, Any]) -> dict[str, Any]:
        # Loading torch takes seconds: not before the connection exists and heartbeats flow.
        from art.engines.torch.pool import EnginePool

        self._pool = EnginePool.load(model, EngineConfig.model_validate(config))
        return asdict(self._pool.info())

    def _call(self, call_id: int, method: str, params: dict[str, Any]) -> None:
        pool = self._pool
        if pool is None:
            raise ProcessError(f"`{method}` came before `start`")
        if method == "generate":
            fields = params["request"] | {"request_id": str(call_id)}
            fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
            pool.submit(GenerateRequest(**fields), stream=params["stream"])
        elif method == "score":
            pool.submit_score(str(call_id), params["token_ids"], params["adapter"])
        elif method == "load_adapter":
            self._child.tick("loading weights")
            info = pool.load_adapter(params["name"], Path(params["path"]))
            self._replies.append((call_id, asdict(info), True))
        elif method == "unload_adapter":
            pool.unload_adapter(params["name"], lambda: self._replies.append((call_id, None, True)))
        elif method == "info":
            self._replies.append((call_id, asdict(pool.info()), True))
        elif method == "stats":
            self._replies.append((call_id, pool.stats(), True))
        else:
            raise InvalidRequestError(f"unknown method {method!r}")

    def _step(self, engine: TorchEngine) -> None:
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
            self._answer(output)

    def _answer(self, output: Output) -> None:
        call_id = int(output.request_id)
        if output.error is not None:
            self._failures.append((call_id, output.error))
        elif output.chunk is not None:
            self._replies.append((call_id, _chunk_body(output.chunk), output.chunk.finish_reason is not None))
        else:
            self._replies.append((call_id, output.logprobs, True))

    def _flush(self) -> None:
        if self._replies:
            self._child.socket.reply_many(self._replies)
            self._replies = []
        for call_id, error in self._failures:
            self._child.socket.fail(call_id, error)
        self._failures = []


def _chunk_body(chunk: TokenChunk) -> dict[str, Any]:
    return {
        "token_ids": chunk.token_ids,
        "logprobs": chunk.logprobs,
        "top_logprobs": chunk.top_logprobs,
        "finish_reason": chunk.finish_reason,
        "num_cached_tokens": chunk.num_cached_tokens,
    }


def main() -> None:
    EngineChild(child_from_argv("engine_child")).run()


if __name__ == "__main__":
    main()
