"""Options of the commands that run a recipe. Each has the name and the default of a setting of `RecipeConfig`.

An option that is not on the command line is `None` in the namespace, so that the config decides what it means.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from art.cli.terminal.progress_printer import EXIT_BUDGET
from art.config.base import describe_invalid
from art.errors import ConfigError
from art.recipes.judged.judged_config import JudgedConfig
from art.recipes.judged.judged_run import VALIDATIONS
from art.recipes.recipe_config import RecipeConfig
from art.task import LEARNING_RATE, TINY_LEARNING_RATE, TaskDefaults

C = TypeVar("C", bound=RecipeConfig)

_PRICE = ("PROMPT", "COMPLETION")


def config_of(config: type[C], args: argparse.Namespace) -> C:
    """The settings that were given on the command line.

    Raises:
        ConfigError: a value that the setting cannot have.
    """
    values = {name: getattr(args, name, None) for name in config.model_fields}
    try:
        return config.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        options = {name: f"--{name.replace('_', '-')}" for name in config.model_fields}
        raise ConfigError(describe_invalid(error, options)) from None


def add_place_options(parser: argparse.ArgumentParser, *, project: str) -> None:
    parser.add_argument("--project", help=f"project name (default: {project})")
    parser.add_argument("--data-dir", type=Path, help=f"where models are kept (default: {_default('data_dir')})")


def add_loop_options(parser: argparse.ArgumentParser, defaults: TaskDefaults | None = None) -> None:
    """Options for how long, how fast and on how much to train.

    Args:
        defaults: defaults to show in `--help`; without them it refers to the task's own.
    """
    own = "the task's own"
    if defaults is not None:
        numbers = {
            "steps": defaults.num_steps, "groups": defaults.groups_per_step, "rollouts": defaults.rollouts_per_group
        }  # fmt: skip
        own = ", ".join(f"{name} {number}" for name, number in numbers.items())
    parser.add_argument("--steps", type=int, help=f"train up to this step (default: {own})")
    parser.add_argument("--seed", type=int, help=f"of scenarios and sampling (default: {_default('seed')})")
    by_kind = f"{LEARNING_RATE:g}, or {TINY_LEARNING_RATE:g} for a tiny model"
    parser.add_argument(
        "--learning-rate", type=float, help=f"peak learning rate (default: {by_kind}, unless the task has its own)"
    )
    parser.add_argument("--groups", type=int, help=f"scenarios per step (default: {own})")
    parser.add_argument("--rollouts", type=int, help=f"rollouts per scenario (default: {own})")
    parser.add_argument(
        "--rollout-timeout", type=float, metavar="S", help="end a rollout that takes longer, and leave it out"
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options for what is trained, and for the engine that samples."""
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument(
        "--lora-rank", type=int, help=f"rank of the adapter (default: {_default('lora_rank')})"
    )  # fmt: skip
    trained.add_argument(
        "--full-finetuning", action="store_true", default=None,
        help="train all weights of the decoder layers instead of an adapter",
    )  # fmt: skip
    parser.add_argument(
        "--engine", choices=["torch", "vllm"],
        help="what samples: the embedded engine, or vLLM, whose environment ART_VLLM_PYTHON names (default: "
        f"{_default('engine')})",
    )  # fmt: skip
    parser.add_argument("--max-context", type=int, help="tokens of prompt plus completion (default: the model's own)")


def add_judge_options(parser: argparse.ArgumentParser, what_for: str, *, default: str | None = None) -> None:
    """Options for who scores.

    Args:
        what_for: the text above the options.
        default: the judge without `--judge`; `None` for no judge.
    """
    judge = parser.add_argument_group("judge", what_for)
    named = "" if default is None else f" (default: {default})"
    judge.add_argument("--judge", metavar="MODEL",
                       help=f"as litellm names it, e.g. openai/o3 or ollama_chat/qwen3:8b{named}")  # fmt: skip
    judge.add_argument("--judge-url", metavar="URL", help="of an OpenAI-compatible server that answers for MODEL")
    judge.add_argument("--judge-passes", type=int, choices=[1, 2],
                       help="2 judges each group in two orders, against order bias (default: 1)")  # fmt: skip
    judge.add_argument("--judge-rubric", dest="rubric", type=_text_in, metavar="FILE",
                       help="what is good, in prose (default: RULER's own)")  # fmt: skip


def add_generator_options(group: argparse._ArgumentGroup) -> None:
    """Options for the model that writes scenarios."""
    group.add_argument("--generator", metavar="MODEL", help="who writes them, as litellm names it (default: the judge)")
    group.add_argument("--generator-url", metavar="URL", help="of an OpenAI-compatible server that answers for it")
    group.add_argument("--instructions", metavar="TEXT", help="what they should be about, in your words")


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """Options for a budget, and for the prices that only the user knows."""
    costs = parser.add_argument_group("costs", "prices of judges are known where litellm knows them")
    costs.add_argument(
        "--budget", type=float, metavar="USD",
        help=f"stop when all of it has cost so much, in this run and earlier ones of the model (exit code "
        f"{EXIT_BUDGET}; every finished step is kept)",
    )  # fmt: skip
    costs.add_argument("--price-per-hour", type=float, metavar="USD", help="of this machine")
    for whose, what in (("policy", "policy's tokens"), ("judge", "judge's tokens, in place of litellm's")):
        costs.add_argument(
            f"--{whose}-price", type=float, nargs=2, metavar=_PRICE, help=f"of the {what}, in USD per million"
        )


def add_evaluation_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Options for the comparisons with the untrained policy.

    Args:
        what: what is counted, e.g. "rollouts of each held-out scenario".
    """
    evaluate = JudgedConfig.model_fields["evaluate"].default
    parser.add_argument(
        "--evaluate", type=_count, metavar="N",
        help=f"{what}, before and after (default: {evaluate}; 0 for no evaluation)",
    )  # fmt: skip
    parser.add_argument(
        "--validate-every", type=_count, metavar="N",
        help="steps between looks at how far the policy has come from the untrained one, both judged together "
        f"(default: {VALIDATIONS} times in all; 0 for never)",
    )  # fmt: skip


def _default(setting: str) -> object:
    return RecipeConfig.model_fields[setting].default


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text!r}")
    return int(text)


def _text_in(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None
