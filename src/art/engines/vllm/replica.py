"""HTTP calls to one vLLM server, and the translation of its answers.

They use only what several releases of vLLM have in common: `/v1/completions` with token ids in `prompt`, loading of
adapters at run time, `/health` and `/metrics`. Sleep and the exchange of weights need vLLM's development routes, which
are open only on servers that ART starts (`command.server_environment`).
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from struct import pack
from typing import Any

import aiohttp
import orjson

from art.engine import GenerateRequest, Timings, TokenChunk
from art.errors import (
    AdapterError,
    ArtError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    ProcessError,
)
from art.kernels.grammar import with_end

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 120.0
"""Time limit for loading an adapter, which first waits for the current engine step."""
RELOAD_TIMEOUT_S = 1800.0
"""Time limit for reading the weights of a whole model."""
RESET_TRIES = 100
RESET_AGAIN_S = 0.1
MAX_LINE_BYTES = 2**24
"""Largest event of a stream. An event contains the log-probs of its tokens."""
EXCLUDED_LOGPROB = -9998.0
"""Log-probs below this mean a token outside top_p; vLLM writes -9999 for minus infinity."""
_METRIC = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{[^}]*\})? ([-+.\w]+)$", re.MULTILINE)


class ConnectionLostError(ProcessError):
    """The server could not be reached, or ended in the middle of an answer."""


class Replica:
    """A client of the vLLM server at `url`. Call `close()` after use."""

    def __init__(self, url: str, key: str | None, socket: Path | None = None) -> None:
        """
        Args:
            socket: Unix socket to connect to; `url` is then only used in messages.
        """
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            connector=aiohttp.TCPConnector(limit=0) if socket is None else aiohttp.UnixConnector(str(socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=MAX_LINE_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def is_healthy(self) -> bool:
        try:
            async with self._request("GET", "/health") as response:
                return response.status == 200
        except ConnectionLostError:
            return False

    async def model(self) -> tuple[str, int]:
        """Return the name of the base model that the server serves, and its longest context in tokens."""
        answer = orjson.loads(await self._answer("GET", "/v1/models"))
        served = next(entry for entry in answer["data"] if entry.get("parent") is None)
        return served["id"], served["max_model_len"]

    async def generate(self, request: GenerateRequest, model: str, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        """Generate a completion. `model` is the served name of the base model or of an adapter."""
        body = _completion_body(request, model) | {"stream": stream}
        if not stream:
            answer = await self._post("/v1/completions", body)
            chunk = _chunk(answer["choices"][0], request.num_top_logprobs)
            yield replace(chunk, num_cached_tokens=_num_cached(answer), timings=_timings(answer))
            return
        body["stream_options"] = {"include_usage": True}
        last: TokenChunk | None = None
        held: list[TokenChunk] = []
        sent_at = 0.0
        async with aclosing(self._events(body)) as events:
            async for event in events:
                if not event["choices"]:  # the last event, with the usage
                    assert last is not None
                    last = replace(last, num_cached_tokens=_num_cached(event), timings=_timings(event))
                    continue
                chunk = _chunk(event["choices"][0], request.num_top_logprobs)
                held.append(chunk)
                if chunk.finish_reason is not None:
                    last = _joined(held)
                elif chunk.token_ids and time.monotonic() - sent_at >= request.chunk_every_s:
                    yield _joined(held)
                    held, sent_at = [], time.monotonic()
        if last is None:
            raise ProcessError("vLLM ended a stream without a finish reason")
        yield last

    async def score(self, token_ids: list[int], model: str) -> list[float]:
        """Return the log-probs of `token_ids[1:]`. vLLM samples at least one token, so one is sampled and dropped."""
        body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._post("/v1/completions", body)
        scored = answer["choices"][0]["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], scored[1:], strict=True)]

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the adapter in folder `path` under a name.

        Raises:
            AdapterError: vLLM refused the adapter.
        """
        body = {"lora_name": name, "lora_path": _absolute(path)}
        try:
            await self._post("/v1/load_lora_adapter", body, timeout_s=CONTROL_TIMEOUT_S)
        except ConnectionLostError:
            raise
        except ArtError as error:
            raise AdapterError(error.message) from error

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. An unknown name is not an error."""
        with suppress(NotFoundError):
            await self._post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=CONTROL_TIMEOUT_S)

    async def sleep(self) -> None:
        """Free the memory of the weights and the KV cache, and empty the prefix cache. New requests wait.

        Running requests are kept. After `wake`, their KV is computed again from their tokens.
        """
        await self._post("/sleep?level=1&mode=keep", {}, timeout_s=CONTROL_TIMEOUT_S)

    async def wake(self) -> None:
        await self._post("/wake_up", {}, timeout_s=CONTROL_TIMEOUT_S)

    async def replace_weights(self, folder: Path) -> None:
        """Replace the weights by those of the model in `folder`, and empty the KV cache.

        No request may run. The folder must contain no other safetensors files, since vLLM reads all of them.

        Raises:
            ProcessError: the exchange failed. The server's weights are unknown then, and it may be about to end.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": _absolute(folder)}}
        await self._post("/collective_rpc", body, timeout_s=RELOAD_TIMEOUT_S)
        for _ in range(RESET_TRIES):  # vLLM refuses while it still works on a cancelled request
            if (await self._post("/reset_prefix_cache", {}, timeout_s=CONTROL_TIMEOUT_S))["success"]:
                return
            await asyncio.sleep(RESET_AGAIN_S)
        waited = f"{RESET_TRIES * RESET_AGAIN_S:g} s"
        raise ProcessError(f"the vLLM server at {self.url} has not emptied its prefix cache within {waited}")

    async def metrics(self) -> dict[str, float]:
        """Return counters and gauges by name without the prefix `vllm:`, summed over the engines of the server."""
        async with self._request("GET", "/metrics") as response:
            text = await response.text()
        totals: dict[str, float] = {}
        for name, value in _METRIC.findall(text):
            totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        answer = await self._answer("POST", path, data=orjson.dumps(body), timeout=timeout)
        return orjson.loads(answer) if answer.startswith(b"{") else None

    async def _answer(self, method: str, path: str, **options: Any) -> bytes:
        async with self._request(method, path, **options) as response:
            body: bytes = await response.read()
            if response.status != 200:
                raise _error(response.status, body)
            return body

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the events of a completion. Closing the generator closes the connection, and vLLM drops the request."""
        async with self._request("POST", "/v1/completions", data=orjson.dumps(body)) as response:
            if response.status != 200:
                raise _error(response.status, await response.read())
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    return
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise _error(event["error"].get("code", 500), line[6:])
                yield event

    @asynccontextmanager
    async def _request(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and read its answer in the body of `async with`, which may raise `ConnectionLostError`."""
        try:
            async with self._session.request(method, self.url + path, **options) as response:
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            problem = f"the vLLM server at {self.url} does not answer: {type(error).__name__}: {error}"
            raise ConnectionLostError(problem) from error


def _absolute(path: Path) -> str:
    return os.path.abspath(path)  # the server's working directory may be another


def _completion_body(request: GenerateRequest, model: str) -> dict[str, Any]:
    """The body of a request. It sets all that changes the distribution, so a server's defaults do not matter."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": request.num_top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        # Only the stop tokens of the request end it, not the EOS tokens of the model's files.
        "ignore_eos": True,
        "stop_token_ids": request.stop_token_ids,
    }
    if request.repeatable:  # vLLM draws each such request by itself, which takes long in large batches
        body["seed"] = seed_of(request)
    if request.grammar is not None:
        # vLLM ends an answer at the tokenizer's EOS token only, so the grammar itself says where the stop tokens come.
        body["structured_outputs"] = {"grammar": with_end(request.grammar, request.stop_token_ids)}
    return body


def seed_of(request: GenerateRequest) -> int:
    """Return the seed to send to vLLM with a request. It depends on the index of the request's first token.

    vLLM draws the tokens of a request from one random generator, in order. A resumed request needs another seed, or its
    first token would be drawn with the random number of the completion's first token. The seed has 63 bits, since vLLM
    reads -1 as no seed.
    """
    digest = blake2b(pack("<QQ", request.seed, request.first_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _joined(chunks: list[TokenChunk]) -> TokenChunk:
    """The tokens of several chunks as one chunk, which is otherwise like the last."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs],
    )


def _chunk(choice: dict[str, Any], num_top: int) -> TokenChunk:
    tokens: list[int] = choice["token_ids"] or []
    report = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
    logprobs = report["token_logprobs"]
    if len(logprobs) != len(tokens):
        raise ProcessError(f"vLLM sent {len(logprobs)} log-probs with {len(tokens)} tokens")
    if (reason := choice["finish_reason"]) not in (None, "stop", "length"):
        raise ProcessError(f"vLLM aborted a completion (finish reason {reason!r})")
    top_logprobs = []
    for entry in report["top_logprobs"] if num_top else ():  # keys like `token_id:17`; vLLM adds the sampled token
        pairs = [(int(key.rpartition(":")[2]), logprob) for key, logprob in entry.items() if logprob > EXCLUDED_LOGPROB]
        top_logprobs.append(sorted(pairs, key=lambda pair: -pair[1])[:num_top])
    return TokenChunk(
        token_ids=tokens,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        finish_reason=reason,
    )


def _num_cached(answer: dict[str, Any]) -> int:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _timings(answer: dict[str, Any]) -> Timings | None:
    """How long a request took by vLLM's own clock. Servers without `--enable-per-request-metrics` do not say it."""
    metrics = answer.get("metrics")
    if not metrics:
        return None
    # vLLM counts the time to the first token from the moment at which it begins to compute the prompt.
    names = ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    queue_s, prefill_s, decode_s = (None if (ms := metrics.get(n)) is None else max(0.0, ms / 1000) for n in names)
    return Timings(queue_s=queue_s, prefill_s=prefill_s, decode_s=decode_s)


def _error(status: int, body: bytes) -> ArtError:
    """Translate an answer with a status other than 200 to one of ART's errors."""
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = body[:500].decode(errors="replace")
    message = f"vLLM: {message}"
    if status == 404:
        return NotFoundError(message, param="model")
    if status in (400, 422):
        too_long = "maximum context length" in message or "longer than the maximum model length" in message
        return ContextLengthError(message) if too_long else InvalidRequestError(message)
    if status in (401, 403):
        return ConfigError(f"{message}; set VLLM_API_KEY to the key of the running vLLM server")
    return ProcessError(f"{message} (status {status})")
