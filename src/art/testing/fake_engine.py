"""A fake engine for tests of the code around engines. It is deterministic and instant, and needs no torch.

Its policy is a bigram model made of hashes: the distribution of the next token depends on the previous token and on the
adapter's file. It keeps the whole contract of `art.engine`: equal draws for equal seed and index, log-probs that
`score` reproduces, adapters, streaming, cancellation and back-pressure.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from art.config import EngineConfig
from art.engine import AdapterInfo, EngineInfo, FinishReason, GenerateRequest, TokenChunk
from art.engines.requests import check_request, check_score
from art.engines.torch.random import uniforms
from art.engines.vllm.adapters import WEIGHTS_FILE, read_adapter
from art.errors import NotFoundError, OverloadedError

Script = Callable[[GenerateRequest], list[int]]


class FakeEngine:
    """An engine for tests, in this process, without a model. It implements `art.engine.SleepingEngine`."""

    def __init__(
        self,
        *,
        vocab_size: int = 128,
        max_context: int = 4096,
        max_running: int = EngineConfig().max_running,
        max_waiting: int = EngineConfig().max_waiting,
        delay_s: float = 0.0,
        script: Script | None = None,
    ) -> None:
        """
        Args:
            delay_s: time to sleep before each token, so that requests overlap.
            script: returns fixed tokens to answer a request with. The last one should be a stop token.
        """
        self._info = EngineInfo(vocab_size=vocab_size, max_context=max_context, dtype="float32", device="cpu")
        self._seats = asyncio.Semaphore(max_running)
        self._max_requests = max_running + max_waiting
        self._delay_s = delay_s
        self._script = script
        self._adapters: dict[str, bytes] = {}
        self._users: Counter[bytes] = Counter()
        self._changed = asyncio.Condition()
        self._num_requests = self._num_running = self._num_generated = 0
        self._awake = asyncio.Event()
        self._awake.set()
        self.requests: list[GenerateRequest] = []
        """All requests that were accepted, for assertions in tests."""

    async def info(self) -> EngineInfo:
        return self._info

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        check_request(request, self._info)
        salt = self._salt(request.adapter)
        if self._num_requests >= self._max_requests:
            raise OverloadedError(f"{self._num_requests} requests are running or waiting; try again later")
        self.requests.append(request)
        self._num_requests += 1
        self._users[salt] += 1
        try:
            async with self._seats:
                self._num_running += 1
                try:
                    async for chunk in self._run(request, salt, stream=stream):
                        yield chunk
                finally:
                    self._num_running -= 1
        finally:
            self._num_requests -= 1
            self._users[salt] -= 1
            async with self._changed:
                self._changed.notify_all()

    async def sleep(self) -> None:
        self._awake.clear()

    async def wake(self) -> None:
        self._awake.set()

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        await self._awake.wait()
        info = read_adapter(name, path)
        self._adapters[name] = hashlib.sha256((path / WEIGHTS_FILE).read_bytes()).digest()
        return info

    async def unload_adapter(self, name: str) -> None:
        salt = self._adapters.pop(name, None)
        if salt is not None:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._users[salt])

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        check_score(token_ids, self._info)
        await self._awake.wait()
        salt = self._salt(adapter)
        pairs = itertools.pairwise(token_ids)
        return [math.log(self._probs(salt, previous, 1.0, 1.0)[token]) for previous, token in pairs]

    async def stats(self) -> dict[str, float]:
        return {
            "running": float(self._num_running),
            "waiting": float(self._num_requests - self._num_running),
            "adapters": float(len(self._adapters)),
            "generated_tokens": float(self._num_generated),
        }

    async def _run(self, request: GenerateRequest, salt: bytes, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        previous = request.prompt_token_ids[-1]
        limit = min(request.max_tokens, self._info.max_context - len(request.prompt_token_ids))
        scripted = self._script(request)[request.first_index :] if self._script is not None else None
        limit = limit if scripted is None else min(limit, len(scripted))
        tokens: list[int] = []
        logprobs: list[float] = []
        top: list[list[tuple[int, float]]] = []
        for i in range(limit):
            await asyncio.sleep(self._delay_s)
            await self._awake.wait()
            probs = self._probs(salt, previous, request.temperature, request.top_p)
            previous = scripted[i] if scripted else self._draw(request, request.first_index + i, probs)
            self._num_generated += 1
            tokens.append(previous)
            logprobs.append(math.log(max(probs[previous], 1e-30)))
            if request.num_top_logprobs:
                best = np.argsort(-probs, kind="stable")[: request.num_top_logprobs].tolist()
                top.append([(t, math.log(probs[t])) for t in best if probs[t] > 0])
            reason: FinishReason | None = "length" if i + 1 == limit else None
            if previous in request.stop_token_ids:
                reason = "stop"
            if stream or reason is not None:
                yield TokenChunk(token_ids=tokens, logprobs=logprobs, top_logprobs=top, finish_reason=reason)
                tokens, logprobs, top = [], [], []
            if reason is not None:
                return

    @staticmethod
    def _draw(request: GenerateRequest, index: int, probs: npt.NDArray[np.float64]) -> int:
        if request.temperature == 0:
            return int(probs.argmax())
        cumulative = probs.cumsum()
        draw = float(uniforms([request.seed], [index])[0]) * float(cumulative[-1])
        return int(np.searchsorted(cumulative, draw, side="right"))

    def _probs(self, salt: bytes, previous: int, temperature: float, top_p: float) -> npt.NDArray[np.float64]:
        """The distribution of the token after `previous`, [V]."""
        state = int.from_bytes(hashlib.sha256(salt + previous.to_bytes(4, "big")).digest()[:8], "big")
        vocab_size = self._info.vocab_size
        logits = 6.0 * uniforms([state] * vocab_size, range(vocab_size)) / (temperature or 1.0)
        probs: npt.NDArray[np.float64] = np.exp(logits - logits.max())
        probs /= probs.sum()
        if top_p < 1 and temperature > 0:
            order = np.argsort(-probs, kind="stable")
            before = probs[order].cumsum() - probs[order]
            probs[order[before >= top_p]] = 0.0
            probs /= probs.sum()
        return probs

    def _salt(self, adapter: str | None) -> bytes:
        if adapter is None:
            return b"base"
        if adapter not in self._adapters:
            raise NotFoundError(f"adapter {adapter!r} is not loaded (loaded: {sorted(self._adapters)})", param="model")
        return self._adapters[adapter]
