"""An ART server whose engine costs nothing, for `gateway_overhead`: all that is left is what the server adds.

Imports are local: the process that measures forks this one, and stays light itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

API_KEY = "benchmark"


class InstantEngine:
    """Answers with the same tokens at once."""

    def __init__(self, token_ids: list[int]) -> None:
        from art.engine import TokenChunk

        logprobs = [-0.5] * len(token_ids)
        self._whole = TokenChunk(token_ids=token_ids, logprobs=logprobs, finish_reason="stop")
        self._parts = [
            TokenChunk(token_ids=[token], logprobs=[-0.5], finish_reason=None if i < len(token_ids) - 1 else "stop")
            for i, token in enumerate(token_ids)
        ]

    async def generate(self, request: Any, *, stream: bool) -> AsyncGenerator[Any, None]:
        for chunk in self._parts if stream else [self._whole]:
            yield chunk


def serve(sock: socket.socket, model: str, answer: str, pipe: Connection, profile: str | None) -> None:
    """Serve on `sock` until something comes through `pipe`; `profile` names a cProfile file to write."""
    import uvicorn

    from art.config import ServerConfig
    from art.gateway.chat import Gateway
    from art.gateway.policies import PolicyRef
    from art.gateway.recorder import Recorder
    from art.gateway.render import load_renderer
    from art.server.app import create_app
    from art.storage.database import Database

    class Runtime:
        """As much of the real one as chat requests use."""

        def __init__(self, directory: str) -> None:
            renderer = load_renderer(model)
            tokens = renderer.tokenizer.encode(answer, add_special_tokens=False) + [renderer.stop_token_ids[0]]
            self.renderer = type(renderer).__name__
            self.database = Database(Path(directory) / "art.db")
            self.recorder = Recorder(self.database)
            self.gateway = Gateway(cast(Any, self), self.recorder)
            self.policy = PolicyRef(
                project="p", name="m", policy_version=0, engine=cast(Any, InstantEngine(tokens)), adapter="p/m@0",
                renderer=renderer, max_context=32768,
            )  # fmt: skip

        def resolve_ready(self, model: str) -> PolicyRef:
            return self.policy

        async def health(self) -> dict[str, Any]:
            return {"cpu_s": time.process_time(), "renderer": self.renderer}

    async def main() -> None:
        with tempfile.TemporaryDirectory() as directory:
            runtime = Runtime(directory)
            await runtime.recorder.start()
            app = create_app(cast(Any, runtime), api_key=API_KEY, config=ServerConfig(max_body_bytes=1 << 24))
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
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
