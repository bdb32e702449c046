"""Prices that only the user knows: of the policy's tokens and of the devices."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

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
