"""The SDK's client classes, with the headers of rollouts and the light path. Their names go into the `User-Agent`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import openai

from art.client.light.handover import current_call
from art.client.rollout_context import request_headers

if TYPE_CHECKING:
    from openai.resources.chat import AsyncChat

    from art.client.http import Hooks


_NEW_AUTHENTICATION = {"provider", "workload_identity", "_extra_kwargs"}
"""Arguments of `copy` with which headers may differ from request to request."""


class AsyncOpenAI(openai.AsyncOpenAI):
    """An `AsyncOpenAI` whose requests carry the headers of the rollout that sends them."""

    sdk_class: ClassVar[type] = openai.AsyncOpenAI
    """The SDK's own class, also where another library has put one of its own under that name since."""
    asked_model: str = ""
    """`project/name` of the model that the client is for."""
    asks_logprobs: bool = False
    """Whether each chat request asks for log-probs, unless it says something else itself."""
    hooks: Hooks | None = None
    """Hooks that allow the light path; `None` without it."""

    def rollout_headers(self) -> dict[str, str]:
        return request_headers(self.asked_model)

    async def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        call = current_call.get()
        if call is not None:
            headers = call.headers  # of the first attempt, which the light path has made
        else:
            headers = self.rollout_headers() if options.method == "post" else {}
        if self.asks_logprobs:
            options = _with_logprobs(options)
        return await super().request(cast_to, _with_headers(options, headers), **how)

    @functools.cached_property
    def chat(self) -> AsyncChat:
        if self.hooks is None:
            return super().chat
        from art.client.light.completions import make_chat

        return make_chat(self)

    @functools.wraps(openai.AsyncOpenAI.copy)
    def copy(self, **changes: Any) -> AsyncOpenAI:  # type: ignore[override]
        copied = super().copy(**changes)
        copied.asked_model, copied.asks_logprobs = self.asked_model, self.asks_logprobs
        if not (_NEW_AUTHENTICATION & changes.keys() or callable(changes.get("api_key"))):
            copied.hooks = self.hooks
        return copied

    with_options = copy  # type: ignore[assignment]


class OpenAI(openai.OpenAI):
    """An `OpenAI` whose requests carry the headers of the rollout that sends them."""

    asked_model: str = ""
    """`project/name` of the model that the client is for."""
    asks_logprobs: bool = False
    """Whether each chat request asks for log-probs, unless it says something else itself."""

    def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        headers = request_headers(self.asked_model) if options.method == "post" else {}
        if self.asks_logprobs:
            options = _with_logprobs(options)
        return super().request(cast_to, _with_headers(options, headers), **how)

    @functools.wraps(openai.OpenAI.copy)
    def copy(self, **changes: Any) -> OpenAI:  # type: ignore[override]
        copied = super().copy(**changes)
        copied.asked_model, copied.asks_logprobs = self.asked_model, self.asks_logprobs
        return copied

    with_options = copy  # type: ignore[assignment]


def _with_logprobs(options: Any) -> Any:
    """Options of a chat request that asks for log-probs, unless the caller has decided about them."""
    body = options.json_data
    if not (options.url.endswith("/chat/completions") and isinstance(body, Mapping)) or "logprobs" in body:
        return options
    options = options.model_copy()
    options.json_data = {**body, "logprobs": True}
    return options


def _with_headers(options: Any, headers: Mapping[str, str]) -> Any:
    """Options of a request with further headers; headers that the caller has given win."""
    if not headers:
        return options
    options = options.model_copy()
    options.headers = {**headers, **(options.headers or {})}
    return options
