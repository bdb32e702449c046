"""A fake engine for tests of the code around engines. It is deterministic and instant, and needs no torch.

Its policy is a bigram model made of hashes: the distribution of the next token depends on the previous token and on the
adapter's file. It keeps the whole contract of `art.engine`: equal draws for equal seed and index, log-probs that
`score` reproduces, adapters, streaming, cancellation, back-pressure, truncation and grammars.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from art.config import EngineConfig
from art.engine import (
    AdapterInfo,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Timings,
    TokenChunk,
    check_request,
    check_score,
    only_chunk,
)
from art.engines.vllm.vllm_engine import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from art.errors import InvalidRequestError, NotFoundError
from art.kernels.grammar import Matcher, Vocabulary, allowed_bits

Script = Callable[[GenerateRequest], list[int]]
Probs = npt.NDArray[np.float64]


class FakeEngine:
    """An engine for tests, in this process, without a model. It implements `art.engine.SleepingEngine`."""

    def __init__(
        self,
        *,
        vocab_size: int = 128,
        max_context: int = 4096,
        max_running: int = EngineConfig().max_running,
        delay_s: float = 0.0,
        script: Script | None = None,
        tokenizer_json: str | None = None,
    ) -> None:
        """
        Args:
            delay_s: time to sleep before each token, so that requests overlap.
            script: returns fixed tokens to answer a request with. The last one should be a stop token.
            tokenizer_json: content of the model's `tokenizer.json`, with which the engine honours grammars. A script's
                tokens are not held to them.
        """
        self._vocabulary = None if tokenizer_json is None else Vocabulary(tokenizer_json, vocab_size)
        self._info = EngineInfo(
            vocab_size=vocab_size, max_context=max_context, dtype="float32", device="cpu",
            grammars=tokenizer_json is not None, reports_kept=True,
        )  # fmt: skip
        self._seats = asyncio.Semaphore(max_running)
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
        self.requests.append(request)
        self._num_requests += 1
        self._users[salt] += 1
        arrived = time.perf_counter()
        try:
            async with self._seats:
                self._num_running += 1
                drawn = _Drawn(request, arrived)
                try:
                    async for chunk in self._run(request, salt, drawn, stream=stream):
                        yield chunk
                finally:
                    self._num_running -= 1
        finally:
            self._num_requests -= 1
            self._users[salt] -= 1
            async with self._changed:
                self._changed.notify_all()

    async def generate_whole(self, request: GenerateRequest) -> TokenChunk:
        return await only_chunk(self.generate(request, stream=False))

    async def sleep(self) -> None:
        self._awake.clear()

    async def wake(self) -> None:
        self._awake.set()

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        await self._awake.wait()
        info = replace(read_adapter(name, path), norm=_norm(path))
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
        return [math.log(self._probs(salt, previous, 1.0)[token]) for previous, token in pairs]

    async def stats(self) -> dict[str, float]:
        return {
            "running": float(self._num_running),
            "waiting": float(self._num_requests - self._num_running),
            "adapters": float(len(self._adapters)),
            "generated_tokens": float(self._num_generated),
        }

    async def _run(
        self, request: GenerateRequest, salt: bytes, drawn: _Drawn, *, stream: bool
    ) -> AsyncGenerator[TokenChunk, None]:
        previous = request.prompt_token_ids[-1]
        limit = min(request.max_tokens, self._info.max_context - len(request.prompt_token_ids))
        scripted = self._script(request)[request.first_index :] if self._script is not None else None
        limit = limit if scripted is None else min(limit, len(scripted))
        matcher = self._matcher(request)
        for i in range(limit):
            await asyncio.sleep(self._delay_s)
            await self._awake.wait()
            probs = self._probs(salt, previous, request.temperature)
            if matcher is not None and scripted is None:
                probs = _masked(probs, matcher)
            probs, kept = _truncate(probs, request)
            previous = scripted[i] if scripted else self._draw(request, request.first_index + i, probs)
            if matcher is not None and scripted is None and not matcher.advance(previous):
                raise InvalidRequestError("the grammar cannot be continued", param="grammar")
            self._num_generated += 1
            drawn.add(previous, probs, kept)
            reason: FinishReason | None = "length" if i + 1 == limit else None
            if previous in request.stop_token_ids:
                reason = "stop"
            if reason is not None or (stream and drawn.is_due):
                yield drawn.take(reason)
            if reason is not None:
                return

    def _matcher(self, request: GenerateRequest) -> Matcher | None:
        if request.grammar is None or self._vocabulary is None:
            return None
        matcher = self._vocabulary.matcher(request.grammar, request.stop_token_ids)
        if request.first_index:
            matcher.resume(request.prompt_token_ids[-request.first_index :])
        return matcher

    @staticmethod
    def _draw(request: GenerateRequest, index: int, probs: Probs) -> int:
        if request.temperature == 0:
            return int(probs.argmax())
        cumulative = probs.cumsum()
        draw = float(np.random.default_rng([request.seed, index]).random()) * float(cumulative[-1])
        return int(np.searchsorted(cumulative, draw, side="right"))

    def _probs(self, salt: bytes, previous: int, temperature: float) -> Probs:
        """The distribution of the token after `previous`, [V]."""
        state = int.from_bytes(hashlib.sha256(salt + previous.to_bytes(4, "big")).digest()[:8], "big")
        logits = 6.0 * np.random.default_rng(state).random(self._info.vocab_size) / (temperature or 1.0)
        probs: Probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        return probs

    def _salt(self, adapter: str | None) -> bytes:
        if adapter is None:
            return b"base"
        if adapter not in self._adapters:
            raise NotFoundError(f"adapter {adapter!r} is not loaded (loaded: {sorted(self._adapters)})", param="model")
        return self._adapters[adapter]


class _Drawn:
    """The tokens drawn since the last chunk, with what is reported about each."""

    def __init__(self, request: GenerateRequest, arrived: float) -> None:
        self._request = request
        self._arrived, self._began = arrived, time.perf_counter()
        self._first: float | None = None
        self._sent = 0.0
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []
        self._kept: list[list[int]] = []

    @property
    def is_due(self) -> bool:
        """Whether a streamed request gets a chunk now."""
        return time.perf_counter() - self._sent >= self._request.chunk_every_s

    def add(self, token: int, probs: Probs, kept: list[int]) -> None:
        self._first = self._first or time.perf_counter()
        self._token_ids.append(token)
        self._logprobs.append(math.log(max(probs[token], 1e-30)))
        self._kept.append(kept)
        if self._request.num_top_logprobs:
            best = np.argsort(-probs, kind="stable")[: self._request.num_top_logprobs].tolist()
            self._top.append([(t, math.log(probs[t])) for t in best if probs[t] > 0])

    def take(self, reason: FinishReason | None) -> TokenChunk:
        """The chunk of what was drawn since the last call."""
        now = time.perf_counter()
        chunk = TokenChunk(
            token_ids=self._token_ids, logprobs=self._logprobs, top_logprobs=self._top,
            kept=self._kept if any(self._kept) else [], finish_reason=reason,
            timings=None if self._sent and reason is None else self._timings(now if reason is not None else None),
        )  # fmt: skip
        self._sent = now
        self._token_ids, self._logprobs, self._top, self._kept = [], [], [], []
        return chunk

    def _timings(self, ended: float | None) -> Timings:
        first = self._first or self._began
        return Timings(
            queue_s=self._began - self._arrived,
            prefill_s=first - self._began,
            decode_s=None if ended is None else ended - first,
        )


def _masked(probs: Probs, matcher: Matcher) -> Probs:
    """The distribution over the tokens that a grammar allows next."""
    mask = np.zeros(-(-len(probs) // 32), dtype=np.uint32)
    matcher.fill(mask)
    masked: Probs = np.where(allowed_bits(mask, len(probs)), probs, 0.0)
    masked /= masked.sum()
    return masked


def _truncate(probs: Probs, request: GenerateRequest) -> tuple[Probs, list[int]]:
    """The distribution after `top_k`, `top_p` and `min_p`, and what is left of it if they cut something."""
    if request.temperature == 0:
        return probs, []
    order = np.argsort(-probs, kind="stable")
    ordered = probs[order]
    keep = (ordered.cumsum() - ordered < request.top_p) & (ordered >= request.min_p * ordered[0])
    if request.top_k:
        keep[request.top_k :] = False
    left = np.zeros_like(probs)
    left[order[keep]] = ordered[keep]
    cut = np.count_nonzero(left) < np.count_nonzero(probs)
    return left / left.sum(), np.flatnonzero(left).tolist() if cut else []


def _norm(path: Path) -> float:
    """Frobenius norm of all `alpha / rank * B @ A` of the adapter in folder `path`."""
    config, weights = json.loads((path / CONFIG_FILE).read_bytes()), load_file(path / WEIGHTS_FILE)
    pairs = [(weights[key.replace("lora_A", "lora_B")], a) for key, a in weights.items() if "lora_A" in key]
    total = sum(float(np.square(b.astype(np.float64) @ a).sum()) for b, a in pairs)
    return float(config["lora_alpha"] / config["r"]) * math.sqrt(total)
