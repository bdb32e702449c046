"""HTTP clients that measure each request to a model, edit it as a comparison says, and name what went wrong.

They are given to OpenAI's clients, so a task's code asks its model as always. OpenAI's client repeats a request that
failed for a passing reason, and waits as long as `Retry-After` says where a server limits the rate.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import openai
from pydantic import BaseModel, Field

from art_recipes.comparing.model_comparison import CallCounts

_ENDS = ("/chat/completions", "/completions", "/responses", "/messages")
"""Ends of the addresses at which models are asked."""
_SHOWN = 200
"""Characters of an unreadable answer that a message quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How requests to a model are sent."""

    timeout_s: float
    """Time limit of an answer, from its request to its last byte."""
    attempts: int
    """Attempts of a request that fails for a passing reason."""
    max_tokens: int | None = None
    """Limit of tokens of an answer in place of the one that the task sets."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters of each request. They replace those of the task; one that is `None` is not sent."""

    def edit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a request as this model gets it."""
        if self.max_tokens is not None:
            body = body | {key: self.max_tokens for key in ("max_completion_tokens", "max_tokens") if body.get(key)}
        left_out = {key for key, value in self.params.items() if value is None}
        return {key: value for key, value in {**body, **self.params}.items() if key not in left_out}


class MeteredHttp(openai.DefaultAsyncHttpxClient):
    """An asynchronous HTTP client that counts requests to models in `current_calls`."""

    def __init__(self, asking: Asking, **options: Any) -> None:
        super().__init__(**options)
        self._asking = asking

    async def send(self, request: Any, **how: Any) -> Any:
        if (calls := _calls_of(request)) is None:
            return await super().send(request, **how)
        request, started = _edited(self, request, self._asking), time.perf_counter()
        try:
            with _failures(calls):
                async with asyncio.timeout(self._asking.timeout_s) as limit:
                    response = await super().send(request, **how)
                    await response.aread()
        except TimeoutError:
            if not limit.expired():
                raise
            return _answer(request, 408, f"no answer within {self._asking.timeout_s:g} s")
        return _counted(request, response, calls, time.perf_counter() - started)


class MeteredBlockingHttp(openai.DefaultHttpxClient):
    """A blocking HTTP client that counts requests to models, for agents that ask in a thread."""

    def __init__(self, asking: Asking, **options: Any) -> None:
        super().__init__(**options)
        self._asking = asking

    def send(self, request: Any, **how: Any) -> Any:
        if (calls := _calls_of(request)) is None:
            return super().send(request, **how)
        request, started = _edited(self, request, self._asking), time.perf_counter()
        with _failures(calls):
            response = super().send(request, **how)
            response.read()
        return _counted(request, response, calls, time.perf_counter() - started)


def _calls_of(request: Any) -> CallSums | None:
    """The sums that a request is counted in; `None` if it asks no model."""
    asks = request.method == "POST" and request.url.path.endswith(_ENDS)
    return current_calls.get() if asks else None


@contextmanager
def _failures(calls: CallSums) -> Iterator[None]:
    """Count a request that fails in the body."""
    try:
        yield
    except asyncio.CancelledError:
        calls.add_fault("cut_off")
        raise
    except Exception as error:
        calls.add_fault("timeout" if "Timeout" in type(error).__name__ else "connection")
        raise


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
        calls.num_rate_limited += 1
    elif not response.is_success:
        calls.add_fault(str(response.status_code))
    elif "text/event-stream" in response.headers.get("content-type", ""):
        calls.add_answer({}, seconds)
    else:
        try:
            body = json.loads(response.content)
        except ValueError:
            body = None
        if not isinstance(body, dict) or (request.url.path.endswith("/chat/completions") and not _has_message(body)):
            calls.add_fault("unreadable")
            start = " ".join(response.text[:_SHOWN].split())
            said = f"the server answered {response.status_code} without a chat completion: {start}"
            return _answer(request, 502, said)
        calls.add_answer(body, seconds)
    return response


def _has_message(body: dict[str, Any]) -> bool:
    choices = body.get("choices")
    choices = choices if isinstance(choices, list) else []
    return bool(choices) and all(isinstance(one, dict) and isinstance(one.get("message"), dict) for one in choices)


def _answer(request: Any, status: int, message: str) -> Any:
    """Make an answer with an error."""
    library = importlib.import_module(type(request).__module__.partition(".")[0])  # httpx2, or httpx for openai 2
    return library.Response(status, request=request, json={"error": {"message": message, "type": "art_compare"}})


class CallSums(BaseModel):
    """Counts, times and tokens of the requests of one rollout."""

    answer_seconds: list[float] = Field(default_factory=list)
    """Time of each usable answer in seconds."""
    faults: dict[str, int] = Field(default_factory=dict)
    num_rate_limited: int = 0
    num_cut: int = 0
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


def count_calls(rollouts: Sequence[CallSums]) -> CallCounts:
    """Sum up what became of the requests of several rollouts."""
    names = ("num_rate_limited", "num_cut", "num_without_usage")
    faults: Counter[str] = Counter()
    for calls in rollouts:
        faults.update(calls.faults)
    sums = {name: sum(getattr(calls, name) for calls in rollouts) for name in names}
    return CallCounts(num_answered=sum(calls.num_answers for calls in rollouts), faults=dict(faults), **sums)


def _count(value: Any) -> int | None:
    """A number of tokens that a server reported; `None` if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
