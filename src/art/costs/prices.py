"""Prices that only the user knows, and what a policy uses between two bookings: tokens and device time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pydantic import BaseModel, ConfigDict, Field

from art.costs.ledger import Ledger, context_of

_SECONDS_PER_HOUR = 3600.0


class _Price(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenPrice(_Price):
    """Prices of tokens in USD per million."""

    prompt: float = Field(ge=0)
    completion: float = Field(ge=0)
    cached: float | None = Field(default=None, ge=0)
    """Price of prompt tokens that were computed earlier; by default the same as `prompt`."""

    def usd(self, *, prompt_tokens: int, cached_tokens: int = 0, completion_tokens: int) -> float:
        """Return the price of some tokens in USD.

        Example: 2 million prompt tokens, half of them cached, at 4 and cached at 1 USD cost 5 USD.
        """
        cached = self.prompt if self.cached is None else self.cached
        fresh_tokens = prompt_tokens - cached_tokens
        return (fresh_tokens * self.prompt + cached_tokens * cached + completion_tokens * self.completion) / 1e6


class Prices(_Price):
    """Prices of a model's own work. Those of judges and generators are in `JudgeSettings`, or litellm knows them."""

    policy: TokenPrice | None = None
    """Price of the tokens that the model reads and writes, where somebody charges for them."""
    device_usd_per_hour: float | None = Field(default=None, ge=0)
    """Price of the machine that serves and trains the model, with all its devices, for each hour that it is rented."""

    def device_usd(self, seconds: float) -> float | None:
        """Cost of device time; `None` if it has no price."""
        return None if self.device_usd_per_hour is None else self.device_usd_per_hour * seconds / _SECONDS_PER_HOUR


CostCalculator = Callable[[int, int, str], Mapping[str, float]]
"""Function of prompt tokens, completion tokens and `train` or `eval` to costs in USD by name."""


class PolicyMeter:
    """Measures device time between two bookings, and books it with the policy's tokens.

    It is started when the model is registered, since the processes that load the model already occupy the devices.
    """

    def __init__(self) -> None:
        self.calculator: CostCalculator | None = None
        """Computes the costs of the policy's tokens in place of `prices.policy`, if it is set."""
        self._since: float | None = None
        """Time of the last lap, by `time.monotonic`."""

    @property
    def is_running(self) -> bool:
        return self._since is not None

    def start(self, since: float) -> None:
        """Start at `since`, unless the meter runs already."""
        self._since = self._since or since

    def lap(self) -> float:
        """End a lap: return the seconds since the last lap, or since the start."""
        now = time.monotonic()
        passed_s, self._since = now - (self._since or now), now
        return passed_s

    def book(
        self,
        ledger: Ledger,
        prices: Prices,
        counters: tuple[int, int, int] | None,
        *,
        passed_s: float,
        trainer_s: float,
        split: str,
    ) -> None:
        """Book the policy's tokens and the device time of the last lap.

        Args:
            counters: prompt, cached and completion tokens since the server started; `None` if they are not known.
            passed_s: length of the last lap.
            trainer_s: part of the lap in which the trainer worked. The rest went to rollouts, rewards and waiting.
            split: split of the sampled rollouts, `train`, `val` or `test`.
        """

        def price(prompt: int, cached: int, completion: int) -> float | None:
            if self.calculator is not None:
                return sum(self.calculator(prompt, completion, context_of(split)).values())
            if prices.policy is None:
                return None
            return prices.policy.usd(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)

        if counters is not None:
            ledger.book_counters(counters, price)
        trainer_s = min(trainer_s, passed_s)
        for use, seconds in (("trainer", trainer_s), ("rollouts", passed_s - trainer_s)):
            if seconds > 0:
                usd = prices.device_usd(seconds)
                ledger.book(f"gpu/{use}", usd=usd, priced=usd is not None, seconds=seconds)


def close_row(
    ledger: Ledger, reported: Mapping[str, float], split: str, step: int, row_id: str | None = None
) -> dict[str, float]:
    """Book the costs that trajectories report, in USD by source, then end a row of the history; see `Ledger.close`."""
    prefix = f"{context_of(split)}/"  # older code puts the split into the name
    ledger.book_reported({source.removeprefix(prefix): usd for source, usd in reported.items()}, row_id)
    return ledger.close(split, step, row_id)
