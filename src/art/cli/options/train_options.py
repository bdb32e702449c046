"""Options that the commands which train have in common, and what they become."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Literal

from art.cli.options.cost_options import judge_settings
from art.config import EngineConfig, LoraConfig, ModelSettings, VllmConfig
from art.costs import Ledger
from art.errors import ConfigError
from art.rewards import DEFAULT_RUBRIC, JudgeSettings, Ruler, params_at
from art.task import LEARNING_RATE, TINY_LEARNING_RATE, TaskDefaults


def add_loop_options(parser: argparse.ArgumentParser, *, whose: str = "the task's own") -> None:
    """How long, how fast and on how much.

    Args:
        whose: the defaults are, for the help.
    """
    parser.add_argument("--steps", type=int, help=f"train up to this step (default: {whose})")
    parser.add_argument("--seed", type=int, default=0, help="of scenarios and sampling (default: 0)")
    parser.add_argument("--learning-rate", type=float, help=_learning_rate_help())
    parser.add_argument("--groups", type=int, help=f"scenarios per step (default: {whose})")
    parser.add_argument("--rollouts", type=int, help=f"rollouts per scenario (default: {whose})")
    parser.add_argument(
        "--rollout-timeout", type=float, metavar="S", help="end a rollout that takes longer, and leave it out"
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What is trained, and what samples."""
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument(
        "--lora-rank", type=int, default=LoraConfig().rank, help="rank of the adapter (default: %(default)s)"
    )
    trained.add_argument(
        "--full-finetuning", action="store_true", help="train all weights of the decoder layers instead of an adapter"
    )
    parser.add_argument(
        "--engine", choices=["torch", "vllm"], default="torch",
        help="what samples: the embedded engine, or vLLM, whose environment ART_VLLM_PYTHON names (default: torch)",
    )  # fmt: skip
    parser.add_argument("--max-context", type=int, help="tokens of prompt plus completion (default: the model's own)")


def add_judge_options(parser: argparse.ArgumentParser, what_for: str, *, default: str | None = None) -> None:
    """Who scores.

    Args:
        what_for: said above the options.
        default: the judge without `--judge`; `None` for no judge.
    """
    judge = parser.add_argument_group("judge", what_for)
    named = "" if default is None else f" (default: {default})"
    judge.add_argument("--judge", metavar="MODEL", default=default,
                       help=f"as litellm names it, e.g. openai/o3 or ollama_chat/qwen3:8b{named}")  # fmt: skip
    judge.add_argument("--judge-url", metavar="URL", help="of an OpenAI-compatible server that answers for MODEL")
    judge.add_argument("--judge-passes", type=int, choices=[1, 2], default=1,
                       help="2 judges each group in two orders, against order bias (default: 1)")  # fmt: skip
    judge.add_argument(
        "--judge-rubric", type=Path, metavar="FILE", help="what is good, in prose (default: RULER's own)"
    )


def loop_defaults(defaults: TaskDefaults, args: argparse.Namespace) -> TaskDefaults:
    """`defaults` with what the options say instead, and the learning rate of the kind of base model."""
    changes = {
        "learning_rate": args.learning_rate, "groups_per_step": args.groups, "rollouts_per_group": args.rollouts,
        "num_steps": args.steps,
    }  # fmt: skip
    chosen = replace(defaults, **{key: value for key, value in changes.items() if value is not None})
    return chosen if args.base_model is None else chosen.for_base_model(args.base_model)


def _learning_rate_help() -> str:
    by_kind = f"{LEARNING_RATE:g}, or {TINY_LEARNING_RATE:g} for a tiny model"
    return f"peak learning rate (default: {by_kind}, unless the task has its own)"


def model_settings(args: argparse.Namespace) -> ModelSettings:
    lora = None if args.full_finetuning else LoraConfig(rank=args.lora_rank)
    if args.engine != "vllm":
        return ModelSettings(lora=lora, engine=EngineConfig(max_context=args.max_context))
    weights: Literal["lora", "merged"] = "merged" if args.full_finetuning else "lora"
    return ModelSettings(lora=lora, engine=VllmConfig(max_context=args.max_context, weights=weights))


def judge_rubric(args: argparse.Namespace) -> str:
    """What the judge is told is good."""
    return DEFAULT_RUBRIC if args.judge_rubric is None else str(args.judge_rubric.read_text())


def make_judge(args: argparse.Namespace, data_dir: Path, costs: Ledger, *, rubric: str | None = None) -> Ruler:
    """The judge of `--judge`, with its cache in `data_dir`.

    Args:
        costs: where its answers are booked.
        rubric: in place of that of `--judge-rubric`.

    Raises:
        ConfigError: what its provider needs is not installed.
    """
    settings = JudgeSettings(
        passes=args.judge_passes, seed=args.seed, cache_path=data_dir / "cache" / "judge.sqlite"
    )  # fmt: skip
    judge = Ruler(
        args.judge, rubric=judge_rubric(args) if rubric is None else rubric,
        extra_litellm_params=params_at(args.judge_url), settings=judge_settings(args, settings, costs),
    )  # fmt: skip
    require_installed(judge)
    return judge


def require_installed(judge: Ruler) -> None:
    """
    Raises:
        ConfigError: the judge cannot be asked anything before something is installed.
    """
    if problem := judge.grader.client.missing():
        raise ConfigError(problem)
