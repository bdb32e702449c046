"""`model.metrics_builder()` and `track_api_cost` of older code: metrics and costs for the next row of the history.

    builder = model.metrics_builder("train")
    with builder.activate_context():
        await rollouts()                          # books the costs of `track_api_cost` functions
    builder.add_user_timing(step_actor_s=3.1)
    await model.log(groups, split="train")        # writes both

Costs go to `model.costs`, the ledger that also has judges and devices; other numbers wait for `model.log`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar, Token
from typing import Any, ClassVar, TypeVar

from art.costs import Ledger, TokenPrice
from art.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
CostExtractor = Callable[[Any], float | None]
_SUMMED = ("time/step_", "data/step_", "throughput/step_")


class MetricsBuilder:
    """Collects metrics and costs for the next row of a model's history (`history.jsonl`), as older code does."""

    _extractors: ClassVar[dict[str, CostExtractor]] = {}
    _prices: ClassVar[dict[str, TokenPrice]] = {}

    def __init__(self, cost_context: str, ledger: Callable[[], Ledger], pending: dict[str, float]) -> None:
        """
        Args:
            cost_context: first part of the names of costs: `train` or `eval`.
            ledger: returns the model's ledger, whose file may move when the model is registered.
            pending: metrics that wait for the next row; shared by all builders of a model.
        """
        if not cost_context or "/" in cost_context:
            raise ConfigError(f"a cost context is a word such as 'train' or 'eval', got {cost_context!r}")
        self.cost_context = cost_context
        self._ledger = ledger
        self._pending = pending

    # -- costs --

    def add_cost(self, path: str, usd: float) -> None:
        """Book an amount in USD. `path` is the name of the metric without `costs/`, such as `train/search`."""
        self._ledger().book(path.removeprefix("costs/"), usd=usd)

    def add_response_cost(
        self,
        source: str,
        response: Any,
        *,
        provider: str,
        model_name: str,
        prompt_price_per_million: float | None = None,
        completion_price_per_million: float | None = None,
        cached_prompt_price_per_million: float | None = None,
        cache_creation_price_per_million: float | None = None,
        cache_read_price_per_million: float | None = None,
    ) -> float:
        """Book the cost of an answer of a chat API as `costs/<context>/<source>`, and return it in USD.

        The cost is taken from the answer (`usage.cost`), else from a registered extractor, the arguments,
        `register_model_pricing`, or litellm if it is imported.

        Args:
            cached_prompt_price_per_million: price of prompt tokens that were read from the provider's cache, in USD per
                million; `cache_read_price_per_million` is another name for it. By default that of other tokens.
            cache_creation_price_per_million: price of prompt tokens that Anthropic wrote to its cache.

        Raises:
            ConfigError: the price is not known.
        """
        usage = _plain(response.get("usage") if isinstance(response, Mapping) else getattr(response, "usage", None))
        tokens = _tokens_of(usage)
        usd = usage.get("cost")
        if usd is None and (extract := self._extractors.get(provider)) is not None:
            usd = extract(response)
        price = self._prices.get(model_name)
        if prompt_price_per_million is not None or completion_price_per_million is not None:
            price = TokenPrice(
                prompt=prompt_price_per_million or 0.0, completion=completion_price_per_million or 0.0,
                cached=_first(cached_prompt_price_per_million, cache_read_price_per_million),
            )  # fmt: skip
        if usd is None and price is not None:
            created = int(usage.get("cache_creation_input_tokens") or 0)
            creation = _first(cache_creation_price_per_million, price.prompt) or 0.0
            usd = price.usd(**tokens) + created * (creation - price.prompt) / 1e6
        if usd is None:
            usd = _litellm_price(response, f"{provider}/{model_name}")
        if usd is None:
            raise ConfigError(
                f"the price of {provider}/{model_name} is not known: pass prompt_price_per_million and "
                "completion_price_per_million, or call MetricsBuilder.register_model_pricing"
            )
        self._ledger().book(f"{self.cost_context}/{source}", usd=float(usd), **tokens)
        return float(usd)

    @classmethod
    def register_cost_extractor(cls, provider: str, fn: CostExtractor) -> None:
        """Register a function that gives the cost of a provider's answer in USD, or `None`."""
        cls._extractors[provider] = fn

    @classmethod
    def register_model_pricing(
        cls,
        model_name: str,
        *,
        prompt_per_million: float,
        completion_per_million: float,
        cached_prompt_per_million: float | None = None,
    ) -> None:
        """Register the price of a model's tokens in USD."""
        cls._prices[model_name] = TokenPrice(
            prompt=prompt_per_million, completion=completion_per_million, cached=cached_prompt_per_million
        )

    # -- other metrics --

    def add_metric(self, key: str, value: float) -> None:
        """Set a metric of the next row. Costs, `time/step_...`, `data/step_...`, `throughput/step_...` are summed."""
        section, _, name = key.partition("/")
        if not section or not name or "cum" in key.split("/"):
            raise ConfigError(f"a metric is called 'section/name', without 'cum', which ART adds; got {key!r}")
        if section == "costs":
            self.add_cost(name, value)
            return
        before = self._pending.get(key, 0.0) if key.startswith(_SUMMED) else 0.0
        self._pending[key] = before + float(value)

    def add_data(self, step_num_scenarios: int | None = None, step_actor_tokens: int | None = None) -> None:
        self._add("data", step_num_scenarios=step_num_scenarios, step_actor_tokens=step_actor_tokens)

    def add_user_timing(
        self, step_wall_s: float | None = None, step_actor_s: float | None = None, step_eval_s: float | None = None
    ) -> None:
        self._add("time", step_wall_s=step_wall_s, step_actor_s=step_actor_s, step_eval_s=step_eval_s)

    def add_idle_times(self, step_trainer_idle_s: float | None = None, step_actor_idle_s: float | None = None) -> None:
        self._add("throughput", step_trainer_idle_s=step_trainer_idle_s, step_actor_idle_s=step_actor_idle_s)

    def _add(self, section: str, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self.add_metric(f"{section}/{name}", value)

    @contextlib.contextmanager
    def measure(self, key: str) -> Iterator[None]:
        """Context manager: pass the seconds spent inside to `add_metric` as the metric `key`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add_metric(key, time.monotonic() - start)

    async def flush(self) -> dict[str, float]:
        """Return the waiting metrics and forget them. Costs stay with the model and are in its next row."""
        taken = dict(self._pending)
        self._pending.clear()
        return taken

    # -- which builder is asked --

    def for_cost_context(self, cost_context: str) -> MetricsBuilder:
        """Return a builder for the same model that books costs under another context, e.g. `eval`."""
        return MetricsBuilder(cost_context, self._ledger, self._pending)

    def activate(self) -> Token[MetricsBuilder | None]:
        """Make functions with the decorator `track_api_cost` book their costs here until `token.var.reset(token)`."""
        return _active.set(self)

    @contextlib.contextmanager
    def activate_context(self) -> Iterator[MetricsBuilder]:
        """Context manager: inside it, functions with the decorator `track_api_cost` book their costs here."""
        token = self.activate()
        try:
            yield self
        finally:
            _active.reset(token)

    @staticmethod
    def get_active() -> MetricsBuilder:
        """The active builder, with which functions with the decorator `track_api_cost` book their costs.

        Raises:
            LookupError: no builder is active.
        """
        if (active := _active.get()) is None:
            raise LookupError("no metrics builder is active: use `with model.metrics_builder(...).activate_context():`")
        return active


_active: ContextVar[MetricsBuilder | None] = ContextVar("art_metrics_builder", default=None)


def track_api_cost(
    *,
    source: str,
    provider: str,
    model_name: str,
    response_getter: Callable[[Any], Any] | None = None,
    prompt_price_per_million: float | None = None,
    completion_price_per_million: float | None = None,
    cached_prompt_price_per_million: float | None = None,
    cache_creation_price_per_million: float | None = None,
    cache_read_price_per_million: float | None = None,
) -> Callable[[F], F]:
    """Decorate a function that asks a chat API, to book the cost of each answer with the active builder.

    Without an active builder nothing is booked. The function may be async or not.

    Args:
        source: name of the cost, such as `llm_judge/correctness`.
        response_getter: gets the answer from the result of the function; by default the result is the answer.
    """

    def book(result: Any) -> Any:
        if (builder := _active.get()) is not None:
            builder.add_response_cost(
                source, result if response_getter is None else response_getter(result), provider=provider,
                model_name=model_name, prompt_price_per_million=prompt_price_per_million,
                completion_price_per_million=completion_price_per_million,
                cached_prompt_price_per_million=cached_prompt_price_per_million,
                cache_creation_price_per_million=cache_creation_price_per_million,
                cache_read_price_per_million=cache_read_price_per_million,
            )  # fmt: skip
        return result

    def decorate(function: F) -> F:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                return book(await function(*args, **kwargs))

            return call_async  # type: ignore[return-value]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return book(function(*args, **kwargs))

        return call  # type: ignore[return-value]

    return decorate


def _tokens_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return prompt, cached and completion tokens of an answer, by the names of OpenAI or Anthropic.

    OpenAI's prompt tokens include those from the cache. Anthropic's do not include those read from it or written to it.
    """
    read = int(usage.get("cache_read_input_tokens") or 0)
    if usage.get("prompt_tokens") is not None:
        prompt = int(usage.get("prompt_tokens") or 0)
        read = int(_plain(usage.get("prompt_tokens_details")).get("cached_tokens") or 0)
    else:
        prompt = int(usage.get("input_tokens") or 0) + read + int(usage.get("cache_creation_input_tokens") or 0)
    completion = int(usage.get("completion_tokens", usage.get("output_tokens")) or 0)
    return {"prompt_tokens": prompt, "cached_tokens": read, "completion_tokens": completion}


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    return dict(value.model_dump()) if hasattr(value, "model_dump") else {}


def _litellm_price(response: Any, name: str) -> float | None:
    """The cost by litellm, if the program has imported it."""
    if (litellm := sys.modules.get("litellm")) is None:
        return None
    try:
        return float(litellm.completion_cost(completion_response=response, model=name))
    except Exception:  # it raises various errors for an unknown model
        return None
