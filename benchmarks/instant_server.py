"""An ART server whose engine costs nothing, for `gateway_overhead` and `serve_load`: what is left is the server's part.

Imports are local: the process that measures forks this one, and stays light itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import tempfile
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

API_KEY = "benchmark"


class InstantEngine:
    """Answers with the same tokens: at once, or after half to one and a half times `engine_s` seconds, so that requests
    that began together do not stay together."""

    def __init__(self, token_ids: list[int], engine_s: float) -> None:
        from art.engine import TokenChunk

        self._engine_s = engine_s
        self.took_s: dict[int, float] = {}
        """Of each completion, by the seed of its request."""

        logprobs = [-0.5] * len(token_ids)
        self._whole = TokenChunk(token_ids=token_ids, logprobs=logprobs, finish_reason="stop")
        self._parts = [
            TokenChunk(token_ids=[token], logprobs=[-0.5], finish_reason=None if i < len(token_ids) - 1 else "stop")
            for i, token in enumerate(token_ids)
        ]

    async def generate_whole(self, request: Any) -> Any:
        from art.engine import only_chunk

        return await only_chunk(self.generate(request, stream=False))

    async def generate(self, request: Any, *, stream: bool) -> AsyncGenerator[Any, None]:
        chunks = self._parts if stream else [self._whole]
        engine_s = random.uniform(0.5, 1.5) * self._engine_s
        started = time.perf_counter()
        for i, chunk in enumerate(chunks, 1):
            # An engine goes on drawing while a token is on its way: each is due at a time of its own.
            ready = started + engine_s * i / len(chunks)
            if (wait_s := ready - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
                ready = time.perf_counter()  # timers have a resolution of a millisecond
            if chunk.finish_reason is not None:
                self.took_s[request.seed] = ready - started
            yield chunk


def serve(
    sock: socket.socket, model: str, answer: str, pipe: Connection, profile: str | None, engine_s: float = 0.0
) -> None:
    """Serve on `sock` until something comes through `pipe`; `profile` names a cProfile file to write."""
    import uvicorn

    from art.config import ServerConfig
    from art.gateway.chat import Gateway
    from art.gateway.policies import PolicyRef
    from art.gateway.renderer import load_renderer
    from art.record.recorder import Recorder
    from art.server import connections
    from art.server.app import App
    from art.storage.database import Database

    class Runtime:
        """As much of the real one as chat requests use."""

        def __init__(self, directory: str) -> None:
            renderer = load_renderer(model)
            tokens = renderer.tokenizer.encode(answer, add_special_tokens=False) + [renderer.stop_token_ids[0]]
            self.renderer = type(renderer).__name__
            self.database = Database(Path(directory) / "art.db")
            self.recorder = Recorder(self.database)
            self.gateway = Gateway(self, self.recorder)
            self.engine = InstantEngine(tokens, engine_s)
            self.policy = PolicyRef(
                project="p", name="m", policy_version=0, engine=cast(Any, self.engine), adapter="p/m@0",
                renderer=renderer, max_context=32768,
            )  # fmt: skip

        def resolve_ready(self, model: str) -> PolicyRef:
            return self.policy

        def is_ready(self, policy: PolicyRef) -> bool:
            return True

        async def resolve(self, model: str) -> PolicyRef:
            return self.policy

        async def health(self) -> dict[str, Any]:
            took_s, self.engine.took_s = self.engine.took_s, {}
            return {"cpu_s": time.process_time(), "renderer": self.renderer, "engine_took_s": list(took_s.items())}

    async def main() -> None:
        with tempfile.TemporaryDirectory() as directory:
            runtime = Runtime(directory)
            await runtime.recorder.start()
            app = App(cast(Any, runtime), api_key=API_KEY, config=ServerConfig(max_body_bytes=1 << 24))
            settings = uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", http=connections.Connection, ws="none"
            )
            server = uvicorn.Server(settings)
            task = asyncio.create_task(server.serve(sockets=[sock]))
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            server.should_exit = True
            await task
            runtime.database.close()

    run = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop

        run = uvloop.run
    if profile:
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(run, main())
        profiler.dump_stats(profile)
    else:
        run(main())
