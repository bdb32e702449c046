"""Settings of `compare_models`. Their docstrings are also the help of `art compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from art.config.base import Config


class CompareConfig(Config):
    """Settings of a comparison of models on a task."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    games: int = Field(default=100, ge=1)
    """Held-out scenarios that every model gets."""
    rollouts: int = Field(default=1, ge=1)
    """Rollouts of each scenario with each model."""
    seed: int = 0
    """Seed of scenarios and sampling; with the seed of `art train`, the scenarios are those of its --evaluate."""
    split: Literal["test", "val"] = "test"
    """Split that the scenarios are drawn from."""
    reference: str | None = None
    """Model that the others are compared with, by its label; by default the first."""
    data_dir: Path = Path(".art")
    """Data directory with the checkpoints, in which the comparison is kept too."""
    out: Path | None = None
    """Folder of the comparison. By default it is made in the data directory, where the page finds it."""
    concurrency: int = Field(default=16, ge=1)
    """Rollouts at once with one model, and with all models of one address together."""
    call_timeout: float = Field(default=120.0, gt=0)
    """Seconds after which a request without an answer has failed."""
    attempts: int = Field(default=4, ge=1)
    """Attempts of a request that fails for a passing reason."""
    rollout_timeout: float = Field(default=1800.0, gt=0)
    """Seconds after which a rollout has failed."""
    patience: float = Field(default=300.0, ge=0)
    """Seconds for which a request waits, in all, at a server that limits the rate."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Limit of tokens of an answer in place of the task's own, e.g. for models that reason before they answer."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """USD per hour of this machine, the price of models that run on it."""
