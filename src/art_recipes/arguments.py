"""Options that commands of recipes have: the task in its form for a model, and what a settings class already describes.

`add_settings` makes options from the fields of a config: name, type, choices, default and docstring. An option that is
not on the command line is `None` in argparse's namespace, so that the config gives its default.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from art.cli.arguments import options_of, read_settings, read_settings_file
from art.cli.output import EXIT_BUDGET
from art.config.base import Config
from art.task import Task, TaskDefaults, get_task
from art.task.names import other_task, read_form
from art.task.options import changed_options, is_tiny_model, spell_options

if TYPE_CHECKING:
    from rich.console import Console

    from art.cli.output import PlainLines
    from art_recipes.training.recipe_config import RecipeConfig


def task_for(
    console: Console | PlainLines, args: argparse.Namespace, base_model: str | None, *, warns: bool = True
) -> Task:
    """Return the task that `args.task` and `args.task_options` name, in the form that fits the base model.

    A tiny model gets the smaller form of a task that has one, or the form that it was made for; a printed line says so.
    The user's own options win.

    Args:
        base_model: `None` for a tiny model that is made for the task.
        warns: whether to warn of a tiny model that was made for another task, or for other options.

    Raises:
        ConfigError: there is no such task, or an option is not allowed.
    """
    options = options_of(args)
    is_tiny = base_model is None or is_tiny_model(base_model)
    task = get_task(args.task, options, is_tiny=is_tiny)
    form = None if base_model is None else read_form(base_model)
    if form is not None and form.name == task.name:
        known = {key: value for key, value in form.options.items() if key in task.options_class.model_fields}
        task = get_task(args.task, {**known, **options})
    smaller = {key: value for key, value in changed_options(task.options).items() if key not in options}
    if is_tiny and smaller:
        line = f"{task.name} in the form for tiny models: {spell_options(smaller, '-o ')}"
        console.print(f"{line}. Other base models get the full form", highlight=False, soft_wrap=True)
    if warns and base_model is not None and (warning := other_task(task, base_model)):
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    return task


C = TypeVar("C", bound=Config)

_METAVARS: dict[str, str | tuple[str, ...]] = {
    "judge": "MODEL", "generator": "MODEL", "judge_url": "URL", "generator_url": "URL", "rollout_timeout": "S",
    "budget": "USD", "price_per_hour": "USD", "judge_price": ("PROMPT", "COMPLETION"), "instructions": "TEXT",
    "report": "TRACKER", "reference": "MODEL", "out": "DIR", "call_timeout": "S",
}  # fmt: skip
"""Names of values in `--help`, where they are not `N` for a whole number or the name of the setting."""


def config_of(config: type[C], args: argparse.Namespace) -> C:
    """Make a config of the class `config` from the file of --settings and the command line's options, which win.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or has a value that it cannot have. The message
            names the option, or the file and its setting.
    """
    path: Path | None = getattr(args, "settings", None)
    names = [name for name in config.model_fields if name != "settings" and getattr(args, name, None) is not None]
    values = {} if path is None else read_settings_file(path)
    in_file = [name for name in values if name not in names]
    options = {name: f"--{name.replace('_', '-')}" for name in config.model_fields if name not in in_file}
    options |= {"tags": "--tag"} if "tags" in options else {}
    source = str(path) if in_file else ""
    return read_settings(config, values | {name: getattr(args, name) for name in names}, source, options)


def add_recipe_options(
    parser: argparse.ArgumentParser, config: type[RecipeConfig], what_for: str, defaults: TaskDefaults | None = None
) -> None:
    """Add command-line options for the settings that all recipes share.

    Args:
        what_for: what the judge is for, as a heading in `--help`.
        defaults: defaults of the task, to show in `--help`.
    """
    shown = {} if defaults is None else {
        "steps": defaults.num_steps, "groups": defaults.groups_per_step, "rollouts": defaults.rollouts_per_group
    }  # fmt: skip
    add_settings(parser, config, "name", "project", "data_dir", "report")
    add_label_options(parser)
    loop = ("steps", "seed", "learning_rate", "groups", "rollouts", "max_staleness")
    add_settings(parser, config, *loop, shown=shown)
    add_settings(parser.add_mutually_exclusive_group(), config, "lora_rank", "full_finetuning")
    add_settings(parser, config, "engine", "max_context")
    parser.add_argument(
        "--settings", type=Path, metavar="FILE",
        help="TOML or JSON with settings of this command by name, e.g. learning_rate, and `art.ModelSettings` as the "
        "table `settings`, `art.ServerConfig` as the table `server_config`; what the command line says wins",
    )  # fmt: skip
    judge = parser.add_argument_group("judge", what_for)
    add_settings(judge, config, "judge", "judge_url", "judge_passes")
    about = "what is good, in prose (default: the task's, or RULER's)"
    judge.add_argument("--judge-rubric", dest="rubric", type=_text_in, metavar="FILE", help=about)
    budget = f"a run that spends its budget keeps every finished step and ends with the exit code {EXIT_BUDGET}"
    costs = parser.add_argument_group("costs", budget)
    add_settings(costs, config, "budget", "price_per_hour", "judge_price")


def add_label_options(parser: argparse._ActionsContainer) -> None:
    tag_help = "word by which the page finds the run, in place of those that it has; may be given several times"
    parser.add_argument("--tag", action="append", dest="tags", metavar="TAG", help=tag_help)
    parser.add_argument("--notes", metavar="TEXT", help="text about the run for its page, in place of what it has")


def add_settings(
    parser: argparse._ActionsContainer, config: type[Config], *names: str, shown: Mapping[str, object] = {}
) -> None:
    """Add one command-line option for each of the config's settings in `names`. `--help` has the defaults in `shown`
    in place of the config's."""
    for name in names:
        field = config.model_fields[name]
        words = str(field.description).rstrip(".")
        words = words[0].lower() + words[1:] if words[1:2].islower() else words  # USD stays
        default = shown.get(name, field.default)
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
