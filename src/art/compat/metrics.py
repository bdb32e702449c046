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
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from typing import Any, ClassVar, TypeVar

from art.compat.api_answers import CostExtractor, cost_of, first, without_none
from art.costs import Ledger
from art.costs.ledger import full_name
from art.errors import ConfigError
from art.storage.totals import Pending, Totals, hash_scenario

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
_SUMMED = ("time/step_", "data/step_", "throughput/step_")


class MetricsBuilder:
    """Collects metrics and costs for the next row of a model's history (`history.jsonl`), as older code does."""

    _extractors: ClassVar[dict[str, CostExtractor]] = {}
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
        totals: Callable[[], Totals],
        scope: str = "",
    ) -> None:
        """
        Args:
            cost_context: first part of the names of costs: `train` or `eval`.
            ledger: returns the model's ledger, whose file may move when the model is registered.
            pending: what waits for the next row by context; shared by all builders of a model.
            totals: returns the sums over the rows of the model's history.
            scope: context whose row the metrics wait for; "" is the next row.
        """
        if not cost_context or "/" in cost_context:
            raise ConfigError(f"a cost context is a word such as 'train' or 'eval', got {cost_context!r}")
        self.cost_context = cost_context
        self._ledger, self._all_pending, self._totals = ledger, pending, totals
        self._scope = scope

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
        prompt_price_per_million: float | None = None,
        completion_price_per_million: float | None = None,
        cached_prompt_price_per_million: float | None = None,
        cache_creation_price_per_million: float | None = None,
        cache_read_price_per_million: float | None = None,
    ) -> float:
        """Book the cost of an answer of a chat API as `costs/<context>/<source>`, and return it in USD.

        The cost is taken from the answer (`usage.cost`), else from a registered extractor, from prices (the arguments,
        then those of `register_model_pricing`), or from litellm if it is imported.

        Args:
            cached_prompt_price_per_million: price of prompt tokens that were read from the provider's cache, in USD per
                million; `cache_read_price_per_million` is another name for it. By default that of other tokens.
            cache_creation_price_per_million: price of prompt tokens that Anthropic wrote to its cache.

        Raises:
            ConfigError: the price is not known, or the answer does not say how many tokens it used.
        """
        full_model_name = f"{provider}/{model_name.removeprefix(f'{provider}/')}"
        known = self._prices.get(model_name) or self._prices.get(full_model_name, {})
        price = known | without_none(
            prompt=prompt_price_per_million, completion=completion_price_per_million,
            cached=first(cached_prompt_price_per_million, cache_read_price_per_million),
            creation=cache_creation_price_per_million,
        )  # fmt: skip
        usd, tokens = cost_of(response, full_model_name, price, self._extractors.get(provider.lower()))
        self._ledger().book(f"{self.cost_context}/{source.strip('/')}", usd=usd, **tokens)
        return usd

    @classmethod
    def register_cost_extractor(cls, provider: str, fn: CostExtractor) -> None:
        """Register a function that gives the cost of a provider's answer in USD, or `None`."""
        cls._extractors[provider.lower()] = fn

    @classmethod
    def register_model_pricing(
        cls,
        model_name: str,
        *,
        prompt_per_million: float,
        completion_per_million: float,
        cached_prompt_per_million: float | None = None,
        cache_creation_per_million: float | None = None,
        cache_read_per_million: float | None = None,
    ) -> None:
        """Register the price of a model's tokens in USD. See `add_response_cost` for those of a provider's cache."""
        cls._prices[model_name] = without_none(
            prompt=prompt_per_million, completion=completion_per_million,
            cached=first(cached_prompt_per_million, cache_read_per_million), creation=cache_creation_per_million,
        )  # fmt: skip

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

    async def flush(self) -> dict[str, float]:
        """Return the waiting metrics and forget them. Costs and scenarios stay with the model, for its next row."""
        taken = dict(self._pending.metrics)
        self._pending.metrics.clear()
        return taken

    # -- what a model counted elsewhere --

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all rows, costs and scenarios included, as JSON data. What waits is not in it.

        A model finds them in its own files after a restart. This is for moving them to another model.
        """
        sums, scenarios = self._totals().state()
        return make_state(sums, self._spent(), scenarios)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise the model's sums to those of `state`, and count its scenarios too. Loading it again changes nothing.

        Costs that the ledger lacks are booked now, so that the next row and the budget have them.

        Args:
            state: what `state_dict` returned, or what ART 0.5 kept in `state.json` as `_metrics_builder_state`.

        Raises:
            ConfigError: it is something else.
        """
        sums, costs, scenarios = read_state(state)
        self._totals().load_state(sums, scenarios)
        for source, usd in lacking_costs(costs, self._spent()).items():
            self._ledger().book(source, usd=usd)

    def _spent(self) -> dict[str, float]:
        """Return what was spent in USD by source. Sources of no row yet get the context of this builder."""
        spent: defaultdict[str, float] = defaultdict(float)
        for source, amount in self._ledger().totals().items():
            if amount.priced:
                spent[full_name(source, self.cost_context)] += amount.usd
        return spent

    # -- which builder is asked --

    def for_cost_context(self, cost_context: str, *, buffer_scope: str | None = None) -> MetricsBuilder:
        """Return a builder for the same model that books costs under another context, e.g. `eval`.

        Args:
            buffer_scope: context whose row the metrics wait for, by default the same.
        """
        scope = cost_context if buffer_scope is None else buffer_scope
        return MetricsBuilder(cost_context, self._ledger, self._all_pending, self._totals, scope)

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


_unpriced: set[str] = set()
"""Warnings of costs that are not known, each of which is logged once."""
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

    Without an active builder nothing is booked. The function may be async or not. A cost that is not known is logged
    once and not booked; the function's result is returned all the same.

    Args:
        source: name of the cost, such as `llm_judge/correctness`.
        response_getter: gets the answer from the result of the function; by default the result is the answer.
    """

    def book(result: Any) -> Any:
        if (builder := _active.get()) is None:
            return result
        try:
            builder.add_response_cost(
                source, result if response_getter is None else response_getter(result), provider=provider,
                model_name=model_name, prompt_price_per_million=prompt_price_per_million,
                completion_price_per_million=completion_price_per_million,
                cached_prompt_price_per_million=cached_prompt_price_per_million,
                cache_creation_price_per_million=cache_creation_price_per_million,
                cache_read_price_per_million=cache_read_price_per_million,
            )  # fmt: skip
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


_KEYS = {"cum_state": dict, "unique_scenario_hashes": list, "unique_scenario_ids": list}
"""Keys of a state. ART 0.5 kept the ids of scenarios, where now there are hashes."""
_HASH = re.compile("[0-9a-f]{16}")
_COSTS = "costs/cum/"
_SECTIONS = (_COSTS, "data/cum/", "time/cum/", "throughput/cum/")


def make_state(sums: Mapping[str, float], costs: Mapping[str, float], scenarios: Iterable[int]) -> dict[str, Any]:
    """Make a state of sums by metric, costs in USD by source, and hashes of scenarios."""
    return {
        "cum_state": {**sums, **{f"{_COSTS}{source}": usd for source, usd in costs.items()}},
        "unique_scenario_hashes": [f"{number:016x}" for number in scenarios],
    }


def read_state(state: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float], set[int]]:
    """Return sums by metric, costs in USD by source, and hashes of scenarios.

    Raises:
        ConfigError: this is not a state.
    """
    if not all(isinstance(value, _KEYS.get(name, ())) for name, value in state.items()):
        raise ConfigError(f"expected what `state_dict()` returns, with the keys {', '.join(_KEYS)}; got {state!r:.200}")
    sums, costs = {}, {}
    for name, value in state.get("cum_state", {}).items():
        if not (isinstance(value, (int, float)) and math.isfinite(value) and name.startswith(_SECTIONS)):
            raise ConfigError(f"cum_state[{name!r}] is {value!r}; expected a number named {'..., '.join(_SECTIONS)}...")
        if name.startswith(_COSTS):
            costs[name.removeprefix(_COSTS)] = float(value)
        else:
            sums[name] = float(value)
    hashes = state.get("unique_scenario_hashes", [])
    if wrong := [text for text in hashes if not (isinstance(text, str) and _HASH.fullmatch(text))]:
        raise ConfigError(f"unique_scenario_hashes has {wrong[0]!r}; expected texts of 16 hexadecimal digits")
    scenarios = {int(text, 16) for text in hashes}
    return sums, costs, scenarios | set(map(hash_scenario, state.get("unique_scenario_ids", ())))


def lacking_costs(costs: Mapping[str, float], spent: Mapping[str, float]) -> dict[str, float]:
    """Return by how much `costs` exceed what was `spent`, by source.

    Sums such as `train` of `train/judge`, and `all`, are left out.
    """
    lacking = {}
    for name, usd in costs.items():
        if name == "all" or any(other.startswith(f"{name}/") for other in costs):
            continue
        parts = [part for source, part in spent.items() if f"{source}/".startswith(f"{name}/")]
        if usd - sum(parts) > 1e-9:  # more than rounding
            lacking[name] = usd - sum(parts)
    return lacking
