"""Prices that nobody but the user knows: of the policy's tokens and of the devices."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

_SECONDS_PER_HOUR = 3600.0


class _Price(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenPrice(_Price):
    """In USD per million tokens."""

    prompt: float = Field(ge=0)
    completion: float = Field(ge=0)
    cached: float | None = Field(default=None, ge=0)
    """Of the tokens of a prompt that had been computed before; by default like the others."""

    def usd(self, *, prompt_tokens: int, cached_tokens: int = 0, completion_tokens: int) -> float:
        """Example: 2 million prompt tokens, half of them cached, at 4 and cached at 1 USD cost 5 USD."""
        cached = self.prompt if self.cached is None else self.cached
        fresh_tokens = prompt_tokens - cached_tokens
        return (fresh_tokens * self.prompt + cached_tokens * cached + completion_tokens * self.completion) / 1e6


class Prices(_Price):
    """What a model's own work costs. Judges and generators have theirs in `JudgeSettings`, or litellm knows them."""

    policy: TokenPrice | None = None
    """Of the tokens that it reads and writes, where somebody charges for them."""
    device_usd_per_hour: float | None = Field(default=None, ge=0)
    """Of the machine that serves and trains it, all its devices together: rented ones cost whether they work or not."""

    def device_usd(self, seconds: float) -> float | None:
        """`None` if no price is given."""
        return None if self.device_usd_per_hour is None else self.device_usd_per_hour * seconds / _SECONDS_PER_HOUR
