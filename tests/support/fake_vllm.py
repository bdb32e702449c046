"""A fake vLLM server with the HTTP interface that `art.engines.vllm` uses, and a policy that counts upwards."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web
from llguidance import LLMatcher

from art.kernels.grammar import Matcher, Vocabulary, allowed_ids

VOCAB = 100
VOCAB_OF_GRAMMARS = 128
CONTEXT = 65
"""Longest context of the server; the engine keeps one token of it for scoring."""


class FakeVllm:
    """The policy samples t + 1 after token t, with log-prob -1 at temperature 1 and -0.5 at 2.

    The n-th adapter that is loaded shifts both log-probs by 0.1 n.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.num_running = 0
        self.gate = asyncio.Event()
        """Completions wait until this is set."""
        self.gate.set()
        self.refuse: tuple[int, str] | None = None
        """If set, every completion is refused with this status and message."""
        self.processes_logprobs = True
        self.awake = asyncio.Event()
        """Cleared while the server sleeps; completions wait until this is set."""
        self.awake.set()
        self.weights = 0
        """How often the weights were replaced. Each time, log-probs fall by 0.1."""
        self.control: list[str] = []
        """Calls that replace weights and empty the prefix cache."""
        self.vocabulary: Vocabulary | None = None
        """What a server that was started with a tokenizer masks with."""
        self.obeys: Callable[[int], bool] = lambda index: True
        """Whether the server keeps to the grammar at a token of an answer."""
        self.mass = 0.5
        """The share of the distribution that a grammar leaves, as the reported log-probs have it."""
        self.refused_resets = 0
        """How many more times the server refuses to empty its cache."""
        self.tells_times = False
        """Whether the server was started with `--enable-per-request-metrics`."""
        self.app = web.Application()
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/v1/completions", self._complete),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.post("/collective_rpc", self._collective_rpc),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
            ]
        )

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Run the server while the block runs, and yield its URL."""
        runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        base = {"id": "the-base", "max_model_len": CONTEXT, "parent": None}
        others = [{"id": name, "max_model_len": None, "parent": "the-base"} for name in self.adapters]
        return web.json_response({"data": [*others, base]})

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [
            "# HELP vllm:generation_tokens_total Tokens",
            'vllm:generation_tokens_total{engine="0",model_name="b"} 7.0',
            'vllm:generation_tokens_total{engine="1",model_name="b"} 5.0',
            'vllm:num_requests_running{engine="0"} 1.0',
            'vllm:num_requests_waiting{engine="0"} 2.0',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0',
            'vllm:prompt_tokens_total{engine="0"} 30.0',
            'vllm:prompt_tokens_cached_total{engine="0"} 10.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.5',
        ]
        return web.Response(text="\n".join(lines))

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "refused" in body["lora_path"]:
            return _error(400, "no such target module")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text="Success")

    async def _sleep(self, request: web.Request) -> web.Response:
        assert dict(request.query) == {"level": "1", "mode": "keep"}
        self.awake.clear()
        return web.json_response({"status": "sleeping"})

    async def _wake_up(self, _: web.Request) -> web.Response:
        self.awake.set()
        return web.json_response({"status": "awake"})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        assert self.num_running == 0
        body = await request.json()
        assert (body["method"], [*body["kwargs"]]) == ("reload_weights", ["weights_path"])
        self.control.append(body["kwargs"]["weights_path"])
        if "broken" in body["kwargs"]["weights_path"]:
            return _error(500, "Error while deserializing header")
        self.weights += 1
        return web.json_response({"results": [None]})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        self.control.append("reset")
        self.refused_resets -= 1
        return web.json_response({"success": self.refused_resets < 0})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.refuse is not None:
            return _error(*self.refuse)
        if body["model"] != "the-base" and body["model"] not in self.adapters:
            return _error(404, f"The model `{body['model']}` does not exist.")
        self.num_running += 1
        try:
            await self.gate.wait()
            await self.awake.wait()
            return await self._answer(request, body)
        finally:
            self.num_running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "structured_outputs" in body:
            return self._constrained(body)
        first = body["prompt"][-1] + 1
        tokens = [(first + i) % VOCAB for i in range(body["max_tokens"])]
        reason = "length"
        if stops := [i for i, token in enumerate(tokens) if token in body.get("stop_token_ids", ())]:
            tokens, reason = tokens[: stops[0] + 1], "stop"
        choices = [self._choice(body, token) for token in tokens]
        ending: dict[str, Any] = {"usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
        if self.tells_times:
            ending["metrics"] = {"queue_time_ms": 5.0, "time_to_first_token_ms": 20.0, "generation_time_ms": None}
        if not body.get("stream"):
            reports = [choice["logprobs"] for choice in choices]
            logprobs = {name: [report[name][0] for report in reports] for name in reports[0]}
            choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}
            if "prompt_logprobs" in body:
                value = {"logprob": self._logprob(body)}
                choice["prompt_logprobs"] = [None, *({str(token): value} for token in body["prompt"][1:])]
            return web.json_response({"choices": [choice], **ending})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events: list[Any] = [{"choices": [choice]} for choice in choices]
        events[-1]["choices"][0]["finish_reason"] = reason
        for event in [*events, {"choices": [], **ending}]:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _constrained(self, body: dict[str, Any]) -> web.Response:
        """Take the first allowed token each time: a character of the middle of ASCII where one is allowed."""
        if self.vocabulary is None:
            return _error(400, "Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'")
        matcher = Matcher(
            LLMatcher(self.vocabulary._tokenizer, body["structured_outputs"]["grammar"], log_level=0), VOCAB_OF_GRAMMARS
        )
        mask = np.zeros(self.vocabulary.num_words, dtype=np.uint32)
        tokens: list[int] = []
        reports: list[dict[str, float]] = []
        while len(tokens) < body["max_tokens"] and not set(tokens) & set(body["stop_token_ids"]):
            matcher.fill(mask)
            allowed = allowed_ids(mask, VOCAB_OF_GRAMMARS).tolist()
            if not self.obeys(len(tokens)):
                tokens.append(5)
                reports.append({"token_id:5": -1.0})
                break
            logprob = self._logprob(body) - math.log(self.mass) if len(allowed) > 1 else 0.0
            tokens.append(allowed[len(allowed) // 2])
            reports.append({f"token_id:{token}": logprob for token in allowed})
            matcher.advance(tokens[-1])
        logprobs = [report[f"token_id:{token}"] for token, report in zip(tokens, reports, strict=True)]
        reason = "stop" if set(tokens) & set(body["stop_token_ids"]) else "length"
        report = {"token_logprobs": logprobs, "top_logprobs": reports}
        return web.json_response({"choices": [{"token_ids": tokens, "logprobs": report, "finish_reason": reason}]})

    def _choice(self, body: dict[str, Any], token: int) -> dict[str, Any]:
        logprob = self._logprob(body)
        top = {f"token_id:{token}": logprob, "token_id:1": -0.3, "token_id:2": -9999.0}
        report = {"token_logprobs": [logprob], "top_logprobs": [top]}
        return {"token_ids": [token], "logprobs": report, "finish_reason": None}

    def _logprob(self, body: dict[str, Any]) -> float:
        temperature = body.get("temperature", 1.0) if self.processes_logprobs else 1.0
        shift = 0.1 * ([*self.adapters].index(body["model"]) + 1) if body["model"] in self.adapters else 0.0
        return -1.0 / (temperature or 1.0) - shift - 0.1 * self.weights


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
