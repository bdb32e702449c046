"""What `compare_models` can compare: endpoints, checkpoints, base models, and models that the caller made.

    Endpoint(label="o3", url="https://api.openai.com/v1", model="o3", key_variable="OPENAI_API_KEY")
    Checkpoint(label="agent@7", project="games", name="agent", step=7)
    BaseModel(label="tiny", path="./tiny")

`parse_model` makes them from the words of the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from art.config.base import Config
from art.costs import TokenPrice
from art.errors import ConfigError
from art.model import Model
from art.storage.layout import DataDir, validate_name

NO_KEY = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """What all models of a comparison have."""

    label: str
    """Name in tables and pictures, unique in a comparison."""
    price: TokenPrice | None = None
    """Price of its tokens; without one, a provider's own statement is used, if there is any."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters of each request, e.g. `{"reasoning_effort": "low"}`. They replace those of the task. One that
    is `None` is not sent, for a server that refuses it."""
    max_tokens: int | None = None
    """Limit of tokens of an answer in place of the task's own."""


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
    step: int | Literal["latest", "promoted"] = "latest"
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


class CompareConfig(Config):
    """Settings of a comparison of models on a task."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    held_out: int = Field(default=100, ge=1)
    """Held-out scenarios that every model gets."""
    rollouts: int = Field(default=1, ge=1)
    """Rollouts of each scenario with each model."""
    seed: int = 0
    """Seed of scenarios and sampling; with the seed of `art train`, the scenarios are those of its --held-out."""
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
    attempts: int = Field(default=6, ge=1)
    """Attempts of a request that fails for a passing reason, such as a limited rate."""
    rollout_timeout: float = Field(default=1800.0, gt=0)
    """Seconds after which a rollout has failed."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Limit of tokens of an answer in place of the task's own, e.g. for models that reason before they answer."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """USD per hour of this machine, the price of models that run on it."""


PROVIDERS = {
    "anthropic": ("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    "deepseek": ("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "gemini": ("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "groq": ("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "mistral": ("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "ollama": ("http://127.0.0.1:11434/v1", None),
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "openrouter": ("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "xai": ("https://api.x.ai/v1", "XAI_API_KEY"),
}
"""OpenAI-compatible address and key variable of providers, by the names that litellm gives them."""
_FORMS = (
    "PROVIDER/MODEL, MODEL=URL#KEY_VARIABLE, NAME@STEP of the data directory, a folder such as ./model, or a hub id "
    "such as Qwen/Qwen3-8B"
)


def parse_model(text: str, data_dir: Path) -> ComparedModel:
    """Make a model from its name on the command line.

    Raises:
        ConfigError: the text names no model, or a checkpoint that is not there.
    """
    name, is_address, address = text.partition("=http")
    if is_address:
        url, _, variable = f"http{address}".partition("#")
        return Endpoint(label=name, url=url, model=name, key_variable=variable or None)
    provider, _, rest = text.partition("/")
    if provider in PROVIDERS and rest:
        url, key_variable = PROVIDERS[provider]
        return Endpoint(label=text, url=url, model=rest, key_variable=key_variable)
    if text.startswith("hub:"):
        return BaseModel(label=text.removeprefix("hub:"), path=text.removeprefix("hub:"))
    folder = Path(text).expanduser()
    if folder.is_dir() or text.startswith((".", "/", "~")):
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{text!r} is no folder of a model: it has no config.json")
        return BaseModel(label=folder.name or text, path=str(folder.resolve()))
    if "@" in text:
        return _checkpoint(text, data_dir)
    if rest and "/" not in rest:
        return BaseModel(label=text, path=text)
    raise ConfigError(f"{text!r} is no model; expected {_FORMS}")


def _checkpoint(text: str, data_dir: Path) -> Checkpoint:
    model, _, step = text.rpartition("@")
    if step not in ("latest", "promoted") and not step.isdecimal():
        raise ConfigError(f"{text!r}: the step of a checkpoint is a number, `latest` or `promoted`, got {step!r}")
    project, _, name = model.rpartition("/")
    validate_name(name, param="models")
    if not project:
        folders = sorted(data_dir.glob(f"*/models/{name}"))
        if len(folders) != 1:
            what = "no model" if not folders else f"{len(folders)} models"
            there = [f"{one.parent.parent.name}/{one.name}" for one in sorted(data_dir.glob("*/models/*"))]
            more = f" and {len(there) - 5} more" if len(there) > 5 else ""
            raise ConfigError(
                f"{text!r}: the data directory {data_dir} has {what} named {name!r}; name one as PROJECT/NAME@STEP, or "
                f"its directory by --data-dir. There {'is' if len(there) < 2 else 'are'} "
                f"{', '.join(there[:5]) or 'none'}{more}"
            )
        project = folders[0].parent.parent.name
    if not DataDir(data_dir).model(project, name).checkpoints.is_dir():
        raise ConfigError(f"{text!r}: there is no model {project}/{name} in the data directory {data_dir}")
    return Checkpoint(label=text, project=project, name=name, step=int(step) if step.isdecimal() else step)  # type: ignore[arg-type]
