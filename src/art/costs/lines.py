"""Costs as metrics and as lines of text."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate

from art.costs.amount import Amount


def name_row(step: Mapping[str, Amount], total: Mapping[str, Amount]) -> dict[str, float]:
    """Name the costs of a step, and of everything so far, as metrics.

    Example: 0.1 USD of `train/judge/ruler` and 0.2 of `gpu/trainer` give `costs/train/judge/ruler`,
    `costs/train/judge` and `costs/train` of 0.1, `costs/gpu/trainer` and `costs/gpu` of 0.2, and `costs/all` of 0.3.
    """
    return {**_named(step, "costs", "data/step_tokens", "time/step_s"),
            **_named(total, "costs/cum", "data/cum/tokens", "time/cum/s")}  # fmt: skip


def _named(amounts: Mapping[str, Amount], costs: str, tokens: str, seconds: str) -> dict[str, float]:
    usd: defaultdict[str, float] = defaultdict(float)
    others: dict[str, float] = {}
    for source, amount in amounts.items():
        if amount.priced:
            for name in (*accumulate(source.split("/"), "{}/{}".format), "all"):
                usd[f"{costs}/{name}"] += amount.usd
        others |= {f"{tokens}/{source}/{kind}": float(count) for kind, count in amount.tokens().items()}
        if amount.seconds:
            others[f"{seconds}/{source}"] = amount.seconds
    return {**usd, **others}


def describe_source(name: str, amount: Amount) -> str:
    """Write one source as a line of text, e.g. `judge/ruler        0.0020 USD  900 prompt, 80 completion tokens`."""
    money = f"{amount.usd:>10.4f} USD" if amount.priced else f"{'no price':>14}"
    used = ", ".join(f"{count:,} {kind}" for kind, count in amount.tokens().items())
    parts = [f"{used} tokens"] if used else []
    if amount.seconds:
        parts.append(f"{amount.seconds:,.1f} s")
    if amount.unpriced:
        why = "" if importlib.util.find_spec("litellm") else "; litellm, which knows prices, is not installed"
        parts.append(f"the price of {amount.unpriced} requests is not known{why}")
    return "  ".join([f"{name:<28} {money}", *parts])
