"""Reads models from the words of `--models`, and from a TOML file.

openai/gpt-5                                      a provider's model, the key in the provider's variable
gpt-oss=http://host:8000/v1#MY_KEY                any OpenAI-compatible server, the key in MY_KEY
agent@7    games/agent@latest    agent@0          checkpoint of the data directory; 0 is the base
./folder   Qwen/Qwen3-8B   hub:openai/gpt-oss-20b a model that is served here
models.toml                                       a file with a table per model
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel as PydanticModel
from pydantic import ConfigDict, Field

from art.costs import TokenPrice
from art.errors import ConfigError
from art.recipes.comparing.compared_models import BaseModel, Checkpoint, ComparedModel, Endpoint
from art.scenarios.toml_file import read_toml
from art.storage.layout import DataDir, validate_name

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
OwnWord = Callable[[str, str], ComparedModel | None]
_FORMS = (
    "PROVIDER/MODEL, MODEL=URL#KEY_VARIABLE, NAME@STEP of the data directory, a folder such as ./model, a hub id such "
    "as Qwen/Qwen3-8B, or a .toml file"
)


class _ModelTable(PydanticModel):
    """One model of a TOML file."""

    model_config = ConfigDict(extra="forbid")

    use: str | None = None
    url: str | None = None
    model: str | None = None
    key: str | None = None
    price: tuple[float, float] | tuple[float, float, float] | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    omit: tuple[str, ...] = ()
    max_tokens: int | None = Field(default=None, ge=1)
    concurrency: int | None = Field(default=None, ge=1)


class _ModelsFile(PydanticModel):
    model_config = ConfigDict(extra="forbid")

    models: dict[str, _ModelTable]


def parse_models(
    texts: Sequence[str], data_dir: Path, own_word: OwnWord = lambda text, label: None
) -> list[ComparedModel]:
    """Parse the names of models.

    Args:
        own_word: makes the models that only the caller knows, from a text and a label; `None` for other texts.

    Raises:
        ConfigError: a text names no model, or a checkpoint that is not there.
    """
    models: list[ComparedModel] = []
    for text in texts:
        if text.endswith(".toml"):
            models += _read_models(Path(text), data_dir, own_word)
        else:
            models.append(own_word(text, text) or _parse_model(text, data_dir))
    return models


def _parse_model(text: str, data_dir: Path, label: str | None = None) -> ComparedModel:
    name, is_address, address = text.partition("=http")
    if is_address:
        url, _, variable = f"http{address}".partition("#")
        return Endpoint(label=label or name, url=url, model=name, key_variable=variable or None)
    provider, _, rest = text.partition("/")
    if provider in PROVIDERS and rest:
        url, key_variable = PROVIDERS[provider]
        return Endpoint(label=label or text, url=url, model=rest, key_variable=key_variable)
    if text.startswith("hub:"):
        return BaseModel(label=label or text.removeprefix("hub:"), path=text.removeprefix("hub:"))
    folder = Path(text).expanduser()
    if folder.is_dir() or text.startswith((".", "/", "~")):
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{text!r} is no folder of a model: it has no config.json")
        return BaseModel(label=label or folder.name or text, path=str(folder.resolve()))
    if "@" in text:
        return _checkpoint(text, data_dir, label or text)
    if rest and "/" not in rest:
        return BaseModel(label=label or text, path=text)
    raise ConfigError(f"{text!r} is no model; expected {_FORMS}")


def _checkpoint(text: str, data_dir: Path, label: str) -> Checkpoint:
    model, _, step = text.rpartition("@")
    if step != "latest" and not step.isdecimal():
        raise ConfigError(f"{text!r}: the step of a checkpoint is a number or `latest`, got {step!r}")
    project, _, name = model.rpartition("/")
    validate_name(name, param="models")
    if not project:
        folders = sorted(data_dir.glob(f"*/models/{name}"))
        if len(folders) != 1:
            what = "no model" if not folders else f"{len(folders)} models"
            there = [f"{one.parent.parent.name}/{one.name}" for one in sorted(data_dir.glob("*/models/*"))]
            raise ConfigError(
                f"{text!r}: the data directory {data_dir} has {what} named {name!r}; name one as PROJECT/NAME@STEP, or "
                f"its directory by --data-dir. There {_listed(there)}"
            )
        project = folders[0].parent.parent.name
    if not DataDir(data_dir).model(project, name).checkpoints.is_dir():
        raise ConfigError(f"{text!r}: there is no model {project}/{name} in the data directory {data_dir}")
    return Checkpoint(label=label, project=project, name=name, step="latest" if step == "latest" else int(step))


def _listed(models: list[str]) -> str:
    """Example: "are games/a, games/b and 3 more"."""
    if not models:
        return "is none"
    rest = f" and {len(models) - 5} more" if len(models) > 5 else ""
    return f"{'is' if len(models) == 1 else 'are'} {', '.join(models[:5])}{rest}"


def _read_models(path: Path, data_dir: Path, own_word: OwnWord) -> list[ComparedModel]:
    """Read models from a TOML file with a table for each, named by its label (docs/compare.md has an example)."""
    models = []
    for label, table in read_toml(path, _ModelsFile).models.items():
        if (table.use is None) == (table.url is None):
            raise ConfigError(f"{path}: [models.{label}] needs either `use`, or `url` of an OpenAI-compatible server")
        model: ComparedModel
        if table.url is not None:
            if table.key is not None and not table.key.isidentifier():
                raise ConfigError(f"{path}: `key` of [models.{label}] must be the name of an environment variable")
            model = Endpoint(label=label, url=table.url, model=table.model or label, key_variable=table.key)
        elif table.use is not None and table.key is None and table.model is None:
            model = own_word(table.use, label) or _parse_model(table.use, data_dir, label)
        else:
            raise ConfigError(f"{path}: [models.{label}] has `use`, so it takes neither `key` nor `model`")
        price = None if table.price is None else token_price(table.price)
        models.append(
            replace(
                model, price=price, params=table.params, omit=table.omit, max_tokens=table.max_tokens,
                concurrency=table.concurrency,
            )
        )  # fmt: skip
    return models


def token_price(numbers: Sequence[float]) -> TokenPrice:
    """Make a price from USD per million prompt, completion and, optionally, cached tokens.

    Raises:
        ConfigError: there are not two or three numbers from 0.
    """
    if len(numbers) not in (2, 3) or min(numbers) < 0:
        raise ConfigError(
            f"a price is USD per million prompt tokens, completion tokens and, if you like, cached ones; got {numbers}"
        )
    return TokenPrice(prompt=numbers[0], completion=numbers[1], cached=numbers[2] if len(numbers) > 2 else None)
