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
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from typing import Any, ClassVar, TypeVar

from art.costs import Ledger, TokenPrice
from art.errors import ConfigError
from art.storage.history import Pending, hash_scenario

logger = logging.getLogger(__name__)

_KINDS = {
    "prompt": "prompt", "completion": "completion", "cached_prompt": "cached", "cache_read": "cached",
    "cache_creation": "creation",
}  # fmt: skip


def known_prices(prices: Mapping[str, float | None], ending: str) -> dict[str, float]:
    """Return the prices that are not `None`, by the kind of token, from arguments such as `prompt_price_per_million`.

    `cached_prompt` and `cache_read` are prompt tokens from the provider's cache, by default at the price of other ones;
    `cache_creation` are those that Anthropic wrote to its cache.
    """
    if unknown := [name for name in prices if name.removesuffix(ending) not in _KINDS]:
        known = ", ".join(f"{kind}{ending}" for kind in _KINDS)
        raise TypeError(f"unknown arguments {', '.join(unknown)}; prices are {known}")
    return {_KINDS[name.removesuffix(ending)]: price for name, price in prices.items() if price is not None}


def cost_of(response: Any, name: str, price: Mapping[str, float]) -> tuple[float, dict[str, Any]]:
    """Return the cost of an answer in USD, and its prompt, cached and completion tokens.

    Args:
        name: provider and model, `openai/o3`.
        price: USD per million tokens, as far as they are known: `prompt`, `completion`, `cached`, `creation`.

    Raises:
        ConfigError: the price is not known, or the answer does not say how many tokens it used.
    """
    usage = _plain(response.get("usage") if isinstance(response, Mapping) else getattr(response, "usage", None))
    usd = usage.get("cost")
    if usd is None and usage and {"prompt", "completion"} & price.keys():
        # Cached and created tokens without a price have that of prompts.
        prompt, created = price.get("prompt", 0.0), int(usage.get("cache_creation_input_tokens") or 0)
        tokens = TokenPrice(prompt=prompt, completion=price.get("completion", 0.0), cached=price.get("cached"))
        usd = tokens.usd(**_tokens_of(usage)) + created * (price.get("creation", prompt) - prompt) / 1e6
    if usd is None and (litellm := sys.modules.get("litellm")) is not None:  # only if the program has imported it
        with contextlib.suppress(Exception):  # it raises various errors for an unknown model
            usd = float(litellm.completion_cost(completion_response=response, model=name))
    if usd is None and not usage:
        raise ConfigError(
            f"the answer of {name} has no `usage`, so its cost is not known: pass response_getter if the answer is a "
            "part of the result, or ask for the usage of a stream"
        )
    if usd is None:
        raise ConfigError(
            f"the price of {name} is not known: pass prompt_price_per_million and completion_price_per_million, or "
            "call MetricsBuilder.register_model_pricing"
        )
    return float(usd), _tokens_of(usage)


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


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    return dict(value.model_dump()) if hasattr(value, "model_dump") else {}


F = TypeVar("F", bound=Callable[..., Any])
_SUMMED = ("time/step_", "data/step_", "throughput/step_")


class MetricsBuilder:
    """Collects metrics and costs for the next row of a model's history (`history.jsonl`), as older code does."""

    _prices: ClassVar[dict[str, dict[str, float]]] = {
        "openai/gpt-4.1": {"prompt": 2.0, "completion": 8.0, "cached": 0.5},
        "anthropic/claude-sonnet-4-6": {"prompt": 3.0, "completion": 15.0, "cached": 0.3, "creation": 3.75},
    }
    """USD per million tokens, by model: `prompt`, `completion`, perhaps `cached` and `creation`. Older code knew these
    two prices by itself."""

    def __init__(
        self,
        cost_context: str,
        ledger: Callable[[], Ledger],
        pending: defaultdict[str, Pending],
        scope: str = "",
    ) -> None:
        """
        Args:
            cost_context: first part of the names of costs: `train` or `eval`.
            ledger: returns the model's ledger, whose file may move when the model is registered.
            pending: what waits for the next row by context; shared by all builders of a model.
            scope: context whose row the metrics wait for; "" is the next row.
        """
        if not cost_context or "/" in cost_context:
            raise ConfigError(f"a cost context is a word such as 'train' or 'eval', got {cost_context!r}")
        self.cost_context = cost_context
        self._ledger, self._all_pending, self._scope = ledger, pending, scope

    @property
    def _pending(self) -> Pending:
        return self._all_pending[self._scope]

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
        **prices: float | None,
    ) -> float:
        """Book the cost of an answer of a chat API as `costs/<context>/<source>`, and return it in USD.

        The cost is taken from the answer (`usage.cost`), else from prices (the arguments, by the names that
        `known_prices` explains, then those of `register_model_pricing`), or from litellm if it is imported.

        Raises:
            ConfigError: the price is not known, or the answer does not say how many tokens it used.
        """
        full_model_name = f"{provider}/{model_name.removeprefix(f'{provider}/')}"
        known = self._prices.get(model_name) or self._prices.get(full_model_name, {})
        price = known | known_prices(prices, "_price_per_million")
        usd, tokens = cost_of(response, full_model_name, price)
        self._ledger().book(f"{self.cost_context}/{source.strip('/')}", usd=usd, **tokens)
        return usd

    @classmethod
    def register_model_pricing(
        cls,
        model_name: str,
        *,
        prompt_per_million: float,
        completion_per_million: float,
        **prices: float | None,
    ) -> None:
        """Register the price of a model's tokens in USD. See `add_response_cost` for those of a provider's cache."""
        own = {"prompt": prompt_per_million, "completion": completion_per_million}
        cls._prices[model_name] = own | known_prices(prices, "_per_million")

    # -- other metrics --

    def add_metric(self, key: str, value: float) -> None:
        """Set a metric of the next row. Costs, `time/step_...`, `data/step_...`, `throughput/step_...` are summed."""
        section, _, name = key.partition("/")
        if not section or not name or "cum" in key.split("/"):
            raise ConfigError(f"a metric is called 'section/name', without 'cum', which ART adds; got {key!r}")
        if section == "costs":
            self.add_cost(name, value)
            return
        metrics = self._pending.metrics
        before = metrics.get(key, 0.0) if key.startswith(_SUMMED) else 0.0
        metrics[key] = before + float(value)

    def add_data(
        self,
        step_num_scenarios: int | None = None,
        step_actor_tokens: int | None = None,
        scenario_ids: Iterable[str] | None = None,
    ) -> None:
        """Add counts of the step.

        Args:
            scenario_ids: scenarios that the step used. `data/cum/num_unique_scenarios` counts the different ones, with
                those of the groups that are logged with `split="train"`.
        """
        if isinstance(scenario_ids, str):
            raise ConfigError(f"scenario_ids is a list of ids, got the text {scenario_ids!r}; write [{scenario_ids!r}]")
        self._add("data", step_num_scenarios=step_num_scenarios, step_actor_tokens=step_actor_tokens)
        self._pending.scenarios.update(map(hash_scenario, scenario_ids or ()))

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

    # -- which builder is asked --

    def for_cost_context(self, cost_context: str) -> MetricsBuilder:
        """Return a builder for the same model and another context, e.g. `eval`, whose row the metrics wait for."""
        return MetricsBuilder(cost_context, self._ledger, self._all_pending, cost_context)

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


_unpriced: set[str] = set()
"""Warnings of costs that are not known, each of which is logged once."""
_active: ContextVar[MetricsBuilder | None] = ContextVar("art_metrics_builder", default=None)


def track_api_cost(
    *,
    source: str,
    provider: str,
    model_name: str,
    response_getter: Callable[[Any], Any] | None = None,
    **prices: float | None,
) -> Callable[[F], F]:
    """Decorate a function that asks a chat API, to book the cost of each answer with the active builder.

    Without an active builder nothing is booked. The function may be async or not. A cost that is not known is logged
    once and not booked; the function's result is returned all the same.

    Args:
        source: name of the cost, such as `llm_judge/correctness`.
        response_getter: gets the answer from the result of the function; by default the result is the answer.
    """

    known_prices(prices, "_price_per_million")  # raises here and not at the first answer

    def book(result: Any) -> Any:
        if (builder := _active.get()) is None:
            return result
        try:
            response = result if response_getter is None else response_getter(result)
            builder.add_response_cost(source, response, provider=provider, model_name=model_name, **prices)
        except Exception as error:  # the answer is paid for and wanted, whatever is wrong with its price
            if str(error) not in _unpriced:
                _unpriced.add(str(error))
                logger.warning("a cost of %s is not booked: %s", source, error)
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
