"""Settings of recipes in which a judge compares rollouts and a language model writes the scenarios."""

from __future__ import annotations

from pydantic import Field

from art.costs import Ledger
from art.recipes.recipe_config import RecipeConfig
from art.rewards import JudgeSettings
from art.rewards.ruler import DEFAULT_JUDGE


class JudgedConfig(RecipeConfig):
    """Settings that the recipes `auto` and `mcp_rl` share. `auto` keeps exactly these in `run.toml`."""

    judge: str = DEFAULT_JUDGE
    """Language model that compares rollouts, as litellm names it."""
    generator: str | None = None
    """Language model that writes scenarios, as litellm names it; the judge by default."""
    generator_url: str | None = None
    """Address of an OpenAI-compatible server that serves the generator."""
    evaluate: int = Field(default=4, ge=0)
    """Rollouts of each held-out scenario before and after training; 0 for no evaluation."""
    validate_every: int | None = Field(default=None, ge=0)
    """Steps between validations; 0 for none, and by default four validations in the whole training."""

    @property
    def serves_one_step(self) -> bool:
        """Whether the engine holds one checkpoint at a time, which rules out a comparison with the untrained policy."""
        return self.full_finetuning and self.engine == "vllm"

    @property
    def writer(self) -> tuple[str, str | None]:
        """Name and address of the model that writes scenarios."""
        url = self.generator_url or (self.judge_url if self.generator is None else None)
        return self.generator or self.judge, url

    def writer_settings(self, ledger: Ledger) -> JudgeSettings:
        """Settings of requests to the model that writes scenarios. `judge_price` is used only if that is the judge."""
        settings = JudgeSettings(budget=ledger)
        return settings if self.generator else self.judge_settings(settings, ledger)
