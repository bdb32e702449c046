"""Sends requests to a judge model, with retries, time-outs, a limit of concurrent requests, and their price."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from art.backoff import Backoff, Failure, call_with_retries
from art.errors import ArtError, BudgetError, ConfigError, ContextLengthError, JudgeError
from art.model import Model
from art.rewards.judge import JudgeSettings

logger = logging.getLogger(__name__)

INSTALL = "pip install 'agent-reinforcement-trainer[rewards]'"
MAX_WAIT_S = 60.0
_TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
_FORMAT_WORDS = ("response_format", "json_schema", "structured output")
_gates: WeakKeyDictionary[Any, dict[Any, asyncio.Semaphore]] = WeakKeyDictionary()
"""Semaphores that limit concurrent requests, by event loop, and by judge model, address and limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAnswer:
    """An answer of the judge model, with its tokens and price."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """The part of `prompt_tokens` that the provider had in its cache."""
    cost_usd: float | None
    """Cost of the answer in USD; `None` if the price is not known."""
    seconds: float
    """Seconds from the request to the answer."""


class JudgeClient:
    """A client of one judge model, through litellm or, for an `art.Model`, through its OpenAI client."""

    def __init__(
        self,
        model: str | Model[Any, Any],
        params: Mapping[str, Any],
        settings: JudgeSettings,
        *,
        source: str = "judge/other",
    ) -> None:
        """
        Args:
            model: a model name in litellm's form (`openai/o3`, `ollama_chat/qwen3`), or an `art.Model` with an address.
            params: further arguments of each request: `base_url`, `api_key`, `temperature`, ...
            source: name of the answers' cost in the ledger, e.g. `judge/ruler`. Errors call the model by its first
                part, "judge".
        """
        self._model, self._params, self._settings, self._source = model, dict(params), settings, source
        self._role = source.partition("/")[0]
        self._own: Model[Any, Any] | None = None
        if isinstance(model, str) and self._address is not None and not _has_litellm():
            # The providers that litellm needs before the name are taken off.
            provider, _, rest = model.partition("/")
            self._model = self._own = Model(
                name="judge", project="judge", inference_base_url=self._address,
                inference_api_key=self._params.get("api_key") or "none",
                inference_model_name=rest if provider in ("openai", "hosted_vllm") and rest else model,
            )  # fmt: skip
            self._params = {k: v for k, v in self._params.items() if k not in ("base_url", "api_base", "api_key")}
        self._structured = True
        """Whether to send `response_format`; false once the provider has refused it."""

    @property
    def name(self) -> str:
        """The model's name, with its address if it is an `art.Model`."""
        return self._model if isinstance(self._model, str) else f"{self._address}/{self._model.get_inference_name()}"

    @property
    def _address(self) -> str | None:
        if isinstance(self._model, str):
            return self._params.get("base_url") or self._params.get("api_base")
        return self._model.inference_base_url

    def missing(self) -> str | None:
        """A message that says to install litellm, if the model needs it and it is missing; otherwise `None`."""
        if isinstance(self._model, Model) or _has_litellm():
            return None
        return (
            f"the {self._role} {self._model!r} is called through litellm, which is not installed: {INSTALL}. Or give "
            "the address of an OpenAI-compatible server: the option --judge-url, or in Python an `art.Model`"
        )

    async def complete(self, messages: list[dict[str, Any]], response_format: Mapping[str, Any]) -> JudgeAnswer:
        """Send messages to the model and return its answer. Requests that fail for a passing reason are repeated.

        Raises:
            BudgetError: the budget is spent.
            ContextLengthError: the messages are longer than the model's context.
            JudgeError: the model refuses the request, or still fails after `max_attempts`.
        """
        if isinstance(self._model, str) and _has_litellm():
            await _load_litellm()  # before the time limit of the first request begins
        backoff = Backoff(first_s=self._settings.first_wait_s, longest_s=MAX_WAIT_S, longest_asked_s=MAX_WAIT_S)
        answer = await call_with_retries(lambda: self._ask(messages, response_format), backoff, self._before_retry)
        if self._settings.budget is not None:
            self._settings.budget.book(
                self._source, usd=answer.cost_usd, prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens, completion_tokens=answer.completion_tokens,
            )  # fmt: skip
        return answer

    async def _ask(self, messages: list[dict[str, Any]], response_format: Mapping[str, Any]) -> JudgeAnswer:
        """Send a request once, or twice if the provider refuses its `response_format`."""
        if self._settings.budget is not None:
            self._settings.budget.check()
        limit = self._settings.max_concurrent
        gates = _gates.setdefault(asyncio.get_running_loop(), {})
        gate = gates.setdefault((self.name, self._address, limit), asyncio.Semaphore(limit))
        try:
            async with gate, asyncio.timeout(self._settings.timeout_s):
                started = time.monotonic()
                response = await self._send(messages, response_format)
                return self._read(response, time.monotonic() - started)
        except Exception as error:
            is_refusal = getattr(error, "status_code", None) in (400, 404, 415, 422)
            names_format = any(word in str(error).lower() for word in _FORMAT_WORDS)
            if not (self._structured and is_refusal and names_format):
                raise
        self._structured = False
        return await self._ask(messages, response_format)

    def _before_retry(self, failure: Failure) -> None:
        """Raise the error for a failure that another attempt cannot cure, or after the last attempt."""
        error, who = failure.error, f"{self._role} {self.name}"
        if isinstance(error, (JudgeError, ConfigError, BudgetError)):
            raise error
        text = str(error).lower()
        if "contextwindow" in type(error).__name__.lower() or "context_length" in text or "context length" in text:
            raise ContextLengthError(f"the messages exceed the context of the {who}: {_describe(error)}") from error
        status = getattr(error, "status_code", None)
        is_passing = (
            isinstance(error, (TimeoutError, ConnectionError))
            or (isinstance(error, ArtError) and error.transient)
            or type(error).__name__ in ("APIConnectionError", "APITimeoutError", "Timeout")
            or (isinstance(status, int) and (status in _TRANSIENT_STATUS or status >= 500))
        )
        if not is_passing:
            raise JudgeError(f"the {who} refused the request: {_describe(error)}") from error
        if failure.number >= self._settings.max_attempts:
            times = f"{failure.number} times, the last time with"
            raise JudgeError(f"the {who} failed {times} {_describe(error)}") from error
        logger.info("judge: attempt %d failed: %s", failure.number, _describe(error))

    async def close(self) -> None:
        """Close this client's connections in the current event loop. The next request opens new ones."""
        if self._own is not None:
            await self._own.close()

    async def _send(self, messages: list[dict[str, Any]], response_format: Mapping[str, Any]) -> Any:
        shape = {"response_format": dict(response_format)} if self._structured else {}
        request = {"messages": messages, **shape, **self._params}
        if isinstance(self._model, Model):
            client = self._model.openai_client().with_options(max_retries=0, timeout=self._settings.timeout_s)
            return await client.chat.completions.create(model=self._model.get_inference_name(), **request)
        if problem := self.missing():
            raise JudgeError(problem)
        litellm = await _load_litellm()
        defaults = {"num_retries": 0, "max_retries": 0, "caching": False, "timeout": self._settings.timeout_s}
        return await litellm.acompletion(**{**defaults, "model": self._model, **request})

    def _read(self, response: Any, seconds: float) -> JudgeAnswer:
        usage = getattr(response, "usage", None)
        prompt_tokens = int(getattr(usage, "prompt_tokens", 0) or 0)
        completion_tokens = int(getattr(usage, "completion_tokens", 0) or 0)
        cached_tokens = getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", 0) or 0
        message = response.choices[0].message if response.choices else None
        return JudgeAnswer(
            text=(message.content or getattr(message, "refusal", None) or "") if message else "",
            prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=int(cached_tokens),
            cost_usd=self._cost(response, usage, prompt_tokens, completion_tokens), seconds=seconds,
        )  # fmt: skip

    def _cost(self, response: Any, usage: Any, prompt_tokens: int, completion_tokens: int) -> float | None:
        """The price in the settings, else what the provider or litellm reports."""
        prompt_price, price = self._settings.prompt_usd_per_million, self._settings.completion_usd_per_million
        if prompt_price is not None and price is not None:
            return (prompt_tokens * prompt_price + completion_tokens * price) / 1e6
        hidden = getattr(response, "_hidden_params", None) or {}
        charged = hidden.get("response_cost") if (cost := getattr(usage, "cost", None)) is None else cost
        return None if charged is None else float(charged)


def _has_litellm() -> bool:
    return importlib.util.find_spec("litellm") is not None


async def _load_litellm() -> Any:
    """Import litellm in a thread, since that takes seconds the first time."""
    if _import_litellm.cache_info().currsize:
        return _import_litellm()
    # openai checks at each request whether httpx is loaded. Rollouts would fail while the thread has half imported it.
    importlib.import_module("httpx")
    return await asyncio.to_thread(_import_litellm)


@functools.cache
def _import_litellm() -> Any:
    litellm: Any = importlib.import_module("litellm")  # several threads wait here until the first one is done
    litellm.suppress_debug_info = True  # otherwise it prints advice to stdout at every error
    return litellm


def _describe(error: Exception) -> str:
    silent = "no answer within `timeout_s`" if isinstance(error, TimeoutError) else "no message"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500] or silent}"
