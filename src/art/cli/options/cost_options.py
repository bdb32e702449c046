"""Options of commands that spend money: a budget, and the prices that only the user knows."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from art.costs import Ledger, Prices, TokenPrice
from art.errors import ConfigError
from art.model import TrainableModel
from art.rewards import JudgeSettings

EXIT_BUDGET = 3
"""The budget is spent: not what was asked for, and no failure either."""
LAST_BOOKING_S = 3.0
_PRICE = ("PROMPT", "COMPLETION")


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs", "prices of judges are known where litellm knows them")
    costs.add_argument(
        "--budget", type=float, metavar="USD",
        help=f"stop when all of it has cost so much, in this run and earlier ones of the model (exit code "
        f"{EXIT_BUDGET}; every finished step is kept)",
    )  # fmt: skip
    costs.add_argument("--price-per-hour", type=float, metavar="USD", help="of this machine")
    for whose, what in (("policy", "policy's tokens"), ("judge", "judge's tokens, in place of litellm's")):
        costs.add_argument(
            f"--{whose}-price", type=float, nargs=2, metavar=_PRICE, help=f"of the {what}, in USD per million"
        )


def prices_of(args: argparse.Namespace) -> Prices:
    """
    Raises:
        ConfigError: a price below 0, or a budget and nothing that has a price.
    """
    given: Sequence[float] = [args.price_per_hour or 0, args.budget or 0, *(args.policy_price or ())]
    if min(given, default=0) < 0 or min(args.judge_price or [0]) < 0:
        raise ConfigError("prices and budgets must be 0 USD or more")
    if args.budget is not None and args.price_per_hour is None and args.policy_price is None and args.judge is None:
        raise ConfigError(
            "--budget needs something that costs: add --price-per-hour of this machine, --policy-price of its tokens, "
            "or a --judge"
        )
    policy = None if args.policy_price is None else TokenPrice(prompt=args.policy_price[0],
                                                               completion=args.policy_price[1])  # fmt: skip
    return Prices(policy=policy, device_usd_per_hour=args.price_per_hour)


def judge_settings(args: argparse.Namespace, settings: JudgeSettings, ledger: Ledger) -> JudgeSettings:
    """Settings of a judge that books in `ledger`."""
    prompt, completion = args.judge_price or (None, None)
    return replace(settings, budget=ledger, prompt_usd_per_million=prompt, completion_usd_per_million=completion)


async def book_last(model: TrainableModel[Any, Any]) -> None:
    """Book what the end of a run still owes. A server that has died with Ctrl-C is not waited for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_BOOKING_S):
            await model.book_costs()


def show_costs(console: Console, ledger: Ledger) -> None:
    """What was spent on what, if anything has a price."""
    if any(amount.priced or amount.unpriced for amount in ledger.totals().values()):
        console.print("Costs of this model so far:", *(f"  {line}" for line in ledger.lines()), sep="\n",
                      highlight=False, soft_wrap=True)  # fmt: skip
