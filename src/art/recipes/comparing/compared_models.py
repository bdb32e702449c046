"""What `compare_models` can compare: endpoints, checkpoints, base models, and models that the caller made.

    Endpoint(label="o3", url="https://api.openai.com/v1", model="o3", key_variable="OPENAI_API_KEY")
    Checkpoint(label="agent@7", project="games", name="agent", step=7)
    BaseModel(label="tiny", path="./tiny")

`texts.py` makes them from the words of the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from art.costs import TokenPrice
from art.errors import ConfigError
from art.model import Model

NO_KEY = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """What all models of a comparison have."""

    label: str
    """Name in tables and pictures, unique in a comparison."""
    price: TokenPrice | None = None
    """Price of its tokens; without one, a provider's own statement or litellm's table is used, if there is any."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters of each request, e.g. `{"reasoning_effort": "low"}`. They replace those of the task."""
    omit: tuple[str, ...] = ()
    """Parameters of the task's requests that the server does not take, e.g. `("seed",)`."""
    max_tokens: int | None = None
    """Limit of tokens of an answer in place of the task's own."""
    concurrency: int | None = None
    """Rollouts at once, in place of the comparison's own number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(ComparedModel):
    """A model at an OpenAI-compatible address."""

    url: str
    """Base URL, which usually ends with `/v1`."""
    model: str
    """Name to send as `model`."""
    key_variable: str | None = None
    """Environment variable that holds the key; `None` for a server without keys."""
    api_key: str | None = field(default=None, repr=False)
    """The key itself, for callers that have it."""

    def key(self) -> str:
        """Return the API key.

        Raises:
            ConfigError: the environment variable is not set.
        """
        if self.api_key is not None or self.key_variable is None:
            return self.api_key or NO_KEY
        if not (key := os.environ.get(self.key_variable, "")):
            raise ConfigError(
                f"model {self.label!r} needs its API key in the environment variable {self.key_variable}, which is not "
                "set"
            )
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(ComparedModel):
    """A step of a model that was trained in a data directory."""

    project: str
    name: str
    step: int | Literal["latest"] = "latest"
    """0 is the model before training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel(ComparedModel):
    """A pretrained or tiny model, which is served on this machine."""

    path: str
    """Hub id or folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel(ComparedModel):
    """A model object of the caller, such as a registered `TrainableModel` or a scripted player."""

    model: Model[Any, Any]


def check_labels(models: list[ComparedModel]) -> None:
    """Check that there is something to compare, under different names.

    Raises:
        ConfigError: there is no model, or two have the same label.
    """
    if not models:
        raise ConfigError("name at least one model to compare, e.g. scripted")
    labels = [model.label for model in models]
    if doubled := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"two models are both named {doubled[0]!r}; name each once, or give one another label")
