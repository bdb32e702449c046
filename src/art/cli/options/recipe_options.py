"""Makes the options of a command that runs a recipe from the recipe's config: name, type, default and docstring.

An option that is not on the command line is `None` in argparse's namespace, so that the config gives its default.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from art.cli.terminal.progress_printer import EXIT_BUDGET
from art.config.base import Config, describe_invalid
from art.errors import ConfigError
from art.recipes.recipe_config import RecipeConfig
from art.task import TaskDefaults

C = TypeVar("C", bound=Config)

_PRICE = ("PROMPT", "COMPLETION")
_METAVARS: dict[str, str | tuple[str, ...]] = {
    "judge": "MODEL", "generator": "MODEL", "judge_url": "URL", "generator_url": "URL", "rollout_timeout": "S",
    "budget": "USD", "price_per_hour": "USD", "policy_price": _PRICE, "judge_price": _PRICE, "instructions": "TEXT",
    "report": "TRACKER", "stop_on": "FINDING", "rollback_on": "FINDING", "reference": "MODEL", "out": "DIR",
    "call_timeout": "S", "patience": "S",
}  # fmt: skip
"""Names of values in `--help`, where they are not `N` for a whole number or the name of the setting."""


def config_of(config: type[C], args: argparse.Namespace) -> C:
    """Make a config of the class `config` from the options that were given on the command line.

    Raises:
        ConfigError: a setting has a value that it cannot have; the message names the option.
    """
    values = {name: getattr(args, name, None) for name in config.model_fields}
    try:
        return config.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        options = {name: f"--{name.replace('_', '-')}" for name in config.model_fields}
        raise ConfigError(describe_invalid(error, options)) from None


def add_recipe_options(
    parser: argparse.ArgumentParser, config: type[RecipeConfig], what_for: str, defaults: TaskDefaults | None = None
) -> None:
    """Add command-line options for the settings that all recipes share.

    Args:
        what_for: what the judge is for, as a heading in `--help`.
        defaults: defaults of the task, to show in `--help`.
    """
    shown: dict[str, object] = {}
    if defaults is not None:
        shown = {
            "steps": defaults.num_steps, "groups": defaults.groups_per_step, "rollouts": defaults.rollouts_per_group
        }  # fmt: skip
    add_settings(parser, config, "name", "project", "data_dir", "report")
    rate = ("learning_rate", "schedule", "warmup_steps")
    loop = ("steps", "seed", *rate, "groups", "rollouts", "stop_on", "rollback_on", "rollout_timeout", "evaluate")
    add_settings(parser, config, *loop, shown=shown)
    add_settings(parser, config, "max_staleness")
    add_settings(parser.add_mutually_exclusive_group(), config, "lora_rank", "full_finetuning")
    add_settings(parser, config, "engine", "max_context")
    judge = parser.add_argument_group("judge", what_for)
    add_settings(judge, config, "judge", "judge_url", "judge_passes")
    judge.add_argument(
        "--judge-rubric",
        dest="rubric",
        type=_text_in,
        metavar="FILE",
        help="what is good, in prose (default: the task's, or RULER's)",
    )
    budget = f"a run that spends its budget keeps every finished step and ends with the exit code {EXIT_BUDGET}"
    costs = parser.add_argument_group("costs", budget)
    add_settings(costs, config, "budget", "price_per_hour", "policy_price", "judge_price")


def add_settings(
    parser: argparse._ActionsContainer,
    config: type[Config],
    *names: str,
    shown: Mapping[str, object] | None = None,
) -> None:
    """Add one command-line option for each of the config's settings in `names`.

    Args:
        shown: defaults to show in `--help` in place of the config's.
    """
    for name in names:
        field = config.model_fields[name]
        words = str(field.description).rstrip(".")
        default = (shown or {}).get(name, field.default)
        suffix = "" if default is None or default is False or default == () else f" (default: {default})"
        options = _options_of(field.annotation)
        if "action" not in options and "choices" not in options:
            options["metavar"] = _METAVARS.get(name, "N" if options["type"] is int else None)
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{words}{suffix}", **options)


def _options_of(annotation: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for a type."""
    is_optional = NoneType in get_args(annotation)
    kind = next(part for part in get_args(annotation) if part is not NoneType) if is_optional else annotation
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "type": type(get_args(kind)[0])}
    if kind is bool:
        return {"action": "store_true", "default": None}
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        return {"nargs": "+" if rest == [...] else 1 + len(rest), "type": first}
    return {"type": kind}


def _text_in(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None
