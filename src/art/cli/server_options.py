"""The command line of `art-server`, and the file of settings that it may name.

Settings come from the file, then --config-json, then single options; later ones win. The key is not among them: it is
read from ART_API_KEY, because others can see files and command lines.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

import art
from art.config import ServerConfig
from art.config.base_models import SHORT_NAMES, resolve_base_model
from art.errors import ConfigError

DATA_DIR = "data_dir"
"""Key of the settings file for the data directory. The other keys are fields of `ServerConfig`."""
_OVERRIDES = ("host", "port", "models", "gpu", "custom_losses")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="art-server",
        description="Serve models with an OpenAI-compatible API and train them. The key is read from ART_API_KEY.",
    )
    parser.add_argument("--version", action="version", version=f"art-server {art.__version__}")
    parser.add_argument(
        "--model", action="append", dest="models", metavar="MODEL",
        help="base model to load at the start: a hub id, a folder, or a short name such as "
        f"{next(iter(SHORT_NAMES))}; may be given several times",
    )  # fmt: skip
    parser.add_argument("--gpu", action="store_const", const=True, help="do not start without a CUDA device")
    parser.add_argument(
        "--custom-losses", action="append", metavar="MODULE",
        help="module or package whose functions clients may use as losses; they run in the trainer's process; may be "
        "given several times",
    )  # fmt: skip
    parser.add_argument("--data-dir", type=Path, help="where everything is kept (default: .art)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default: 5000)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML or YAML, see docs/server.md")
    parser.add_argument("--config-json", help="the same as JSON, see art.config.ServerConfig")
    parser.add_argument("--fd", type=int, help="an inherited listening socket, instead of --host and --port")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when standard input closes")
    parser.add_argument(
        "--key-from-stdin", action="store_true", help="read the key from the first line of standard input"
    )
    parser.add_argument(
        "--share-key", action="store_true", help="let other commands of this user find the key of ART_API_KEY in a file"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def read_options(args: argparse.Namespace) -> tuple[ServerConfig, Path]:
    """The settings and the data directory that the arguments name.

    Raises:
        ConfigError: a file that cannot be read, a setting that does not exist or has a wrong value, or an
            unknown base model.
    """
    values: dict[str, Any] = {}
    source = "the command line"
    if args.config is not None:
        values, source = _read_file(args.config), str(args.config)
    data_dir = values.pop(DATA_DIR, None)
    if not isinstance(data_dir, str | None):
        raise ConfigError(f"{source}: `{DATA_DIR}` must be a path, got {data_dir!r}")
    if args.config_json:
        values |= _validated(args.config_json, "--config-json").model_dump(exclude_unset=True)
    values |= {name: value for name in _OVERRIDES if (value := getattr(args, name)) is not None}
    config = _validated(values, source)
    for name in config.models:
        resolve_base_model(name)
    return config, Path(args.data_dir or data_dir or ".art").expanduser().resolve()


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in (".yaml", ".yml"):
            return _read_yaml(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # tomllib's error, or bad UTF-8
        raise ConfigError(f"{path} is not valid: {error}") from error
    raise ConfigError(f"{path}: expected a file that ends in .toml, .yaml or .yml")


def _read_yaml(text: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"expected settings by name, got {type(values).__name__}")
    return values or {}


def _validated(values: dict[str, Any] | str, source: str) -> ServerConfig:
    try:
        if isinstance(values, str):
            return ServerConfig.model_validate_json(values)
        return ServerConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] != "extra_forbidden":
            raise ConfigError(f"{source}: `{where}`: {first['msg']}, got {first.get('input')!r}") from None
        names = _names_at(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), names, n=1, cutoff=0.6)
        hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(sorted(names))}"
        raise ConfigError(f"{source}: there is no setting `{where}`; {hint}") from None


def _names_at(loc: tuple[int | str, ...]) -> set[str]:
    """Names of the settings in the group at `loc`."""
    models: list[type[BaseModel]] = [ServerConfig]
    for part in loc:
        inside = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        # `loc` also contains tags of unions; they are not fields and change nothing here.
        models = [model for annotation in inside for model in _models_of(annotation)] or models
    names = {name for model in models for name in model.model_fields}
    return names if loc else names | {DATA_DIR}


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_of(part)]
