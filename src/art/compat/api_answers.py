"""What an answer of a chat API has cost, for `model.metrics_builder()` and `track_api_cost` of older code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from art.costs import TokenPrice
from art.errors import ConfigError

CostExtractor = Callable[[Any], float | None]


def cost_of(
    response: Any, name: str, price: Mapping[str, float], extract: CostExtractor | None
) -> tuple[float, dict[str, Any]]:
    """Return the cost of an answer in USD, and its prompt, cached and completion tokens.

    Args:
        name: provider and model, `openai/o3`.
        price: USD per million tokens, as far as they are known: `prompt`, `completion`, `cached`, `creation`.
        extract: the provider's registered function.

    Raises:
        ConfigError: the price is not known, or the answer does not say how many tokens it used.
    """
    usage = _plain(response.get("usage") if isinstance(response, Mapping) else getattr(response, "usage", None))
    usd = usage.get("cost")
    if usd is None and extract is not None:
        usd = extract(response)
    if usd is None and usage and {"prompt", "completion"} & price.keys():
        usd = _price_of(usage, price)
    if usd is None:
        usd = _litellm_price(response, name)
    if usd is None and not usage:
        raise ConfigError(
            f"the answer of {name} has no `usage`, so its cost is not known: pass response_getter if the answer is a "
            "part of the result, ask for the usage of a stream, or register a cost extractor"
        )
    if usd is None:
        raise ConfigError(
            f"the price of {name} is not known: pass prompt_price_per_million and completion_price_per_million, or "
            "call MetricsBuilder.register_model_pricing"
        )
    return float(usd), _tokens_of(usage)


def without_none(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def first(*values: float | None) -> float | None:
    """Return the first value that is not `None`."""
    return next((value for value in values if value is not None), None)


def _price_of(usage: Mapping[str, Any], price: Mapping[str, float]) -> float:
    """Return the price of an answer in USD. Cached and created tokens without a price have that of prompts."""
    prompt = price.get("prompt", 0.0)
    tokens = TokenPrice(prompt=prompt, completion=price.get("completion", 0.0), cached=price.get("cached"))
    created = int(usage.get("cache_creation_input_tokens") or 0)
    return tokens.usd(**_tokens_of(usage)) + created * (price.get("creation", prompt) - prompt) / 1e6


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


def _litellm_price(response: Any, name: str) -> float | None:
    """The cost by litellm, if the program has imported it."""
    if (litellm := sys.modules.get("litellm")) is None:
        return None
    try:
        return float(litellm.completion_cost(completion_response=response, model=name))
    except Exception:  # it raises various errors for an unknown model
        return None
