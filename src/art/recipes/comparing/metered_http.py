"""HTTP clients that measure each request to a model, wait where a server limits the rate, and name what went wrong.

They are given to OpenAI's clients, so a task's code asks its model as always. OpenAI's client repeats a request that
failed for a passing reason. Rate limits are waited for here instead: a server that says "come back in 10 seconds" has
not failed, and must not use up the attempts of a request.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import openai
from pydantic import BaseModel, ConfigDict, Field

from art.backoff import Backoff, retry_after_s
from art.report.model_comparison import CallCounts

_ENDS = ("/chat/completions", "/completions", "/responses", "/messages")
"""Ends of the addresses at which models are asked."""
_RATE_LIMIT = Backoff(first_s=0.5, longest_s=60.0, longest_asked_s=60.0, jitter=0.0)
"""Waits of all requests together at a server that limits the rate."""
_NO_RETRY = {"x-should-retry": "false"}
_SHOWN = 200
"""Characters of an unreadable answer that a message quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How requests to a model are sent."""

    timeout_s: float
    """Time limit of an answer, from its request to its last byte."""
    attempts: int
    """Attempts of a request that fails for a passing reason."""
    patience_s: float
    """Time for which a request waits, in all, at a server that limits the rate."""
    max_tokens: int | None = None
    """Limit of tokens of an answer in place of the one that the task sets."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters of each request. They replace those of the task."""
    omit: tuple[str, ...] = ()
    """Parameters of the task that the server does not take."""

    def edit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a request as this model gets it."""
        body = {key: value for key, value in body.items() if key not in self.omit}
        if self.max_tokens is not None:
            body |= {key: self.max_tokens for key in ("max_completion_tokens", "max_tokens") if body.get(key)}
        return body | dict(self.params)


class RateLimit:
    """When a server takes requests again. All requests to one address share it."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def pause_s(self) -> float:
        """Return for how long no request should be sent."""
        return max(0.0, self._free_at - time.monotonic())

    def close_for(self, seconds: float) -> None:
        self._free_at = max(self._free_at, time.monotonic() + seconds)


class MeteredHttp(openai.DefaultAsyncHttpxClient):
    """An asynchronous HTTP client that counts requests to models in `current_calls`."""

    def __init__(self, asking: Asking, limit: RateLimit, **options: Any) -> None:
        super().__init__(**options)
        self._asking, self._limit = asking, limit

    async def send(self, request: Any, **how: Any) -> Any:
        calls = current_calls.get()
        if calls is None or request.method != "POST" or not request.url.path.endswith(_ENDS):
            return await super().send(request, **how)
        request = _edited(self, request, self._asking)
        waited_s = 0.0
        for attempt in itertools.count(1):  # each round sends the request once
            while pause_s := self._limit.pause_s():
                waited_s += pause_s
                await asyncio.sleep(pause_s)
            response = await self._send_once(request, calls, how)
            if response.status_code != 429 or _is_final_refusal(response):
                return response
            calls.num_rate_limited += 1
            asked_s = retry_after_s(response.headers) or 0.0
            wait_s = _RATE_LIMIT.pause_s(attempt, asked_s)
            if waited_s + max(wait_s, asked_s) > self._asking.patience_s:
                calls.add_fault("429")
                return _answer(response, 429, f"the server still limits the rate after {waited_s:.0f} s", _NO_RETRY)
            self._limit.close_for(wait_s)
        raise AssertionError("unreachable")

    async def _send_once(self, request: Any, calls: CallSums, how: Mapping[str, Any]) -> Any:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._asking.timeout_s) as limit:
                response = await super().send(request, **how)
                await response.aread()
        except TimeoutError:
            calls.add_fault("timeout" if limit.expired() else "connection")
            if not limit.expired():
                raise
            return _timed_out(request, self._asking.timeout_s)
        except asyncio.CancelledError:
            calls.add_fault("cut_off")
            raise
        except Exception as error:
            calls.add_fault("timeout" if "Timeout" in type(error).__name__ else "connection")
            raise
        return _counted(request, response, calls, time.perf_counter() - started)


class MeteredBlockingHttp(openai.DefaultHttpxClient):
    """A blocking HTTP client that counts requests to models, for agents that ask in a thread."""

    def __init__(self, asking: Asking, limit: RateLimit, **options: Any) -> None:
        super().__init__(**options)
        self._asking, self._limit = asking, limit

    def send(self, request: Any, **how: Any) -> Any:
        calls = current_calls.get()
        if calls is None or request.method != "POST" or not request.url.path.endswith(_ENDS):
            return super().send(request, **how)
        request = _edited(self, request, self._asking)
        while pause_s := self._limit.pause_s():
            time.sleep(pause_s)
        started = time.perf_counter()
        try:
            response = super().send(request, **how)
            response.read()
        except Exception as error:
            calls.add_fault("timeout" if "Timeout" in type(error).__name__ else "connection")
            raise
        if response.status_code == 429 and not _is_final_refusal(response):
            calls.num_rate_limited += 1
            self._limit.close_for(_RATE_LIMIT.pause_s(1, retry_after_s(response.headers) or 0.0))
            return response
        return _counted(request, response, calls, time.perf_counter() - started)


def _edited(client: Any, request: Any, asking: Asking) -> Any:
    try:
        body = json.loads(request.content)
    except ValueError:
        return request
    changed = asking.edit(body)
    if changed == body:
        return request
    headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
    return client.build_request(
        request.method, request.url, headers=headers, content=json.dumps(changed), extensions=request.extensions
    )


def _counted(request: Any, response: Any, calls: CallSums, seconds: float) -> Any:
    """Count an answer that has arrived, and return it, or an error in place of one that nobody can use."""
    if response.status_code == 429:
        if _is_final_refusal(response):
            calls.add_fault("429")
        return response
    if not response.is_success:
        calls.add_fault(str(response.status_code))
        return response
    if "text/event-stream" in response.headers.get("content-type", ""):
        calls.add_answer(_streamed(response.text), seconds)
        return response
    body = _parsed(response.content)
    is_chat = request.url.path.endswith("/chat/completions")
    if body is None or (is_chat and not _has_message(body)):
        calls.add_fault("unreadable")
        start = " ".join(response.text[:_SHOWN].split())
        return _answer(response, 502, f"the server answered {response.status_code} without a chat completion: {start}")
    calls.add_answer(body, seconds)
    return response


def _has_message(body: dict[str, Any]) -> bool:
    choices = body.get("choices")
    return (
        isinstance(choices, list)
        and bool(choices)
        and all(isinstance(choice, dict) and isinstance(choice.get("message"), dict) for choice in choices)
    )


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(content)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _streamed(text: str) -> dict[str, Any]:
    """What a stream of events says about its usage and its end."""
    body: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("data:") and (event := _parsed(line[5:].strip().encode())) is not None:
            body |= {"usage": event["usage"]} if event.get("usage") else {}
            for choice in event.get("choices") or ():
                if choice.get("finish_reason") == "length":
                    body["choices"] = [{"finish_reason": "length", "text": ""}]
    return body


def _is_final_refusal(response: Any) -> bool:
    """Whether a 429 does not pass with time: the account has no money left."""
    return "insufficient_quota" in response.text


def _timed_out(request: Any, timeout_s: float) -> Any:
    library = importlib.import_module(type(request).__module__.partition(".")[0])  # httpx2, or httpx for openai 2
    content = {"error": {"message": f"no answer within {timeout_s:g} s", "type": "timeout"}}
    return library.Response(408, request=request, json=content)


def _answer(response: Any, status: int, message: str, headers: Mapping[str, str] | None = None) -> Any:
    """Make an answer with an error in place of one that was received."""
    content = {"error": {"message": message, "type": "art_compare", "code": None, "param": None}}
    return type(response)(status, request=response.request, json=content, headers=dict(headers or {}))


class CallSums(BaseModel):
    """Counts, times and tokens of the requests of one rollout."""

    model_config = ConfigDict(extra="forbid")

    answer_seconds: list[float] = Field(default_factory=list)
    """Time of each usable answer in seconds."""
    faults: dict[str, int] = Field(default_factory=dict)
    num_rate_limited: int = 0
    num_cut: int = 0
    num_empty: int = 0
    num_without_usage: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    charged_usd: float = 0.0
    """Sum of the costs that the provider reported."""
    num_charged: int = 0
    """Number of answers that came with their cost."""

    @property
    def num_answers(self) -> int:
        return len(self.answer_seconds)

    def add_fault(self, kind: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1

    def add_answer(self, body: dict[str, Any], seconds: float) -> None:
        """Count a usable answer.

        Args:
            body: the answer as JSON, or what is known of a streamed one.
        """
        self.answer_seconds.append(round(seconds, 6))
        choices = body.get("choices") or [{}]
        self.num_cut += any(choice.get("finish_reason") == "length" for choice in choices)
        self.num_empty += "choices" in body and all(_is_empty(choice) for choice in choices)
        usage = body.get("usage") or {}
        prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
        completion = _count(usage.get("completion_tokens", usage.get("output_tokens")))
        if prompt is None or completion is None:
            self.num_without_usage += 1
            return
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.cached_tokens += _count(details.get("cached_tokens")) or 0
        if isinstance(cost := usage.get("cost"), (int, float)) and not isinstance(cost, bool):  # OpenRouter
            self.charged_usd += cost
            self.num_charged += 1


current_calls: ContextVar[CallSums | None] = ContextVar("art_compared_calls", default=None)
"""The sums of the rollout that the running code belongs to."""


def count_calls(rollouts: Iterable[CallSums]) -> CallCounts:
    """Sum up what became of the requests of several rollouts."""
    counts = CallCounts()
    for calls in rollouts:
        counts.num_answered += calls.num_answers
        counts.num_rate_limited += calls.num_rate_limited
        counts.num_cut += calls.num_cut
        counts.num_empty += calls.num_empty
        counts.num_without_usage += calls.num_without_usage
        for kind, count in calls.faults.items():
            counts.faults[kind] = counts.faults.get(kind, 0) + count
    return counts


def _count(value: Any) -> int | None:
    """A number of tokens that a server reported; `None` if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _is_empty(choice: dict[str, Any]) -> bool:
    message = choice.get("message")
    if not isinstance(message, dict):
        return "message" in choice or "text" not in choice
    return not (message.get("content") or message.get("tool_calls") or message.get("function_call"))
