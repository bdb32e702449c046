"""`art train TASK`: the demo's loop without the show, on any base model; continues where the last call stopped."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from art.backends.local import LocalBackend
from art.cli.cost_options import EXIT_BUDGET, add_cost_options, judge_settings, prices_of, show_costs
from art.cli.event_loop import run_coroutine
from art.cli.tiny_model import build_with_progress
from art.config import EngineConfig, LoraConfig, ModelSettings, VllmConfig
from art.costs import Ledger
from art.errors import BudgetError
from art.model import TrainableModel
from art.rewards import DEFAULT_RUBRIC, GroupScorer, JudgeSettings, Ruler, params_at
from art.task import Task, TaskDefaults, get_task
from art.training_loop import StepReport, evaluate, train_task

LAST_BOOKING_S = 3.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train", help="train a task's agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", help="task name, or module:attribute of your own Task")
    parser.add_argument("--base-model", help="hub id or local path (default: a tiny model made for the task)")
    parser.add_argument("--name", help="model name (default: <task>-seed<seed>)")
    parser.add_argument("--project", help="project name (default: the task's name)")
    parser.add_argument("--data-dir", type=Path, default=Path(".art"), help="where everything is kept (default: .art)")
    parser.add_argument("--steps", type=int, help="train up to this step (default: the task's own)")
    parser.add_argument("--seed", type=int, default=0, help="of scenarios and sampling (default: 0)")
    parser.add_argument("--learning-rate", type=float, help="peak learning rate (default: the task's own)")
    parser.add_argument("--groups", type=int, help="scenarios per step (default: the task's own)")
    parser.add_argument("--rollouts", type=int, help="rollouts per scenario (default: the task's own)")
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
    judge = parser.add_argument_group(
        "judge", "a language model scores the rollouts of each scenario, in place of the task's own reward"
    )
    judge.add_argument("--judge", metavar="MODEL", help="as litellm names it, e.g. openai/o3 or ollama_chat/qwen3:8b")
    judge.add_argument("--judge-url", metavar="URL", help="of an OpenAI-compatible server that answers for MODEL")
    judge.add_argument("--judge-passes", type=int, choices=[1, 2], default=1,
                       help="2 judges each group in two orders, against order bias (default: 1)")  # fmt: skip
    judge.add_argument(
        "--judge-rubric", type=Path, metavar="FILE", help="what is good, in prose (default: RULER's own)"
    )
    add_cost_options(parser)
    parser.add_argument(
        "--rollout-timeout", type=float, metavar="S", help="end a rollout that takes longer, and leave it out"
    )
    parser.add_argument(
        "--evaluate", type=int, default=0, metavar="N", help="held-out rollouts at the end (default: none)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary that scripts can read")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    task = get_task(args.task)
    console = Console()
    data_dir: Path = args.data_dir.resolve()
    if args.base_model is None:
        # vLLM on CPU has no attention for the small heads of the usual one.
        head_dim, suffix = (32, "-vllm") if args.engine == "vllm" else (16, "")
        path = data_dir / "tiny-models" / f"{task.name}-seed{args.seed}{suffix}"
        if not (path / "model.safetensors").exists():
            build_with_progress(console, path, task=task.name, seed=args.seed, head_dim=head_dim)
        args.base_model = str(path)
    try:
        return run_coroutine(_train(console, task, args, data_dir))
    except KeyboardInterrupt:
        console.print("Stopped. Every finished step is kept; the same command continues")
        return 130


def _defaults(task: Task, args: argparse.Namespace) -> TaskDefaults:
    changes = {
        "learning_rate": args.learning_rate, "groups_per_step": args.groups, "rollouts_per_group": args.rollouts,
        "num_steps": args.steps,
    }  # fmt: skip
    return replace(task.defaults, **{key: value for key, value in changes.items() if value is not None})


def _settings(args: argparse.Namespace) -> ModelSettings:
    lora = None if args.full_finetuning else LoraConfig(rank=args.lora_rank)
    if args.engine != "vllm":
        return ModelSettings(lora=lora, engine=EngineConfig(max_context=args.max_context))
    weights: Literal["lora", "merged"] = "merged" if args.full_finetuning else "lora"
    return ModelSettings(lora=lora, engine=VllmConfig(max_context=args.max_context, weights=weights))


def _scorer(args: argparse.Namespace, data_dir: Path, ledger: Ledger) -> GroupScorer | None:
    if args.judge is None:
        return None
    settings = JudgeSettings(
        passes=args.judge_passes, seed=args.seed, cache_path=data_dir / "cache" / "judge.sqlite"
    )  # fmt: skip
    settings = judge_settings(args, settings, ledger)
    rubric = DEFAULT_RUBRIC if args.judge_rubric is None else args.judge_rubric.read_text()
    return GroupScorer(
        Ruler(args.judge, rubric=rubric, extra_litellm_params=params_at(args.judge_url), settings=settings)
    )


async def _train(console: Console, task: Task, args: argparse.Namespace, data_dir: Path) -> int:
    started = time.perf_counter()
    defaults = _defaults(task, args)
    settings, prices = _settings(args), prices_of(args)
    summary: dict[str, object] = {"task": task.name, "seed": args.seed, "stopped": None}
    async with LocalBackend(path=data_dir) as backend:
        model = TrainableModel(
            name=args.name or f"{task.name}-seed{args.seed}",
            project=args.project or task.name,
            base_model=args.base_model,
            base_path=str(data_dir),
            settings=settings,
            prices=prices,
            budget_usd=args.budget,
        )
        await model.register(backend)
        console.print(f"{model.get_inference_name()} stands at step {await model.get_step()} of {defaults.num_steps}")
        reports: list[StepReport] = []

        def on_step(report: StepReport) -> None:
            reports.append(report)
            console.print(
                f"step {report.step:>4}  {report.line(task.headline_metric)}", highlight=False, soft_wrap=True
            )

        try:
            await train_task(
                model, task, defaults, num_steps=defaults.num_steps, seed=args.seed, on_step=on_step,
                score=_scorer(args, data_dir, model.costs), rollout_timeout_s=args.rollout_timeout,
            )  # fmt: skip
            if args.evaluate:
                summary |= await _evaluate(console, model, task, args)
        except BudgetError as error:
            summary["stopped"] = "budget"
            console.print(f"Stopped at step {await model.get_step()}: {error}. Every finished step is kept",
                          highlight=False, soft_wrap=True)  # fmt: skip
        finally:
            with contextlib.suppress(TimeoutError):  # a server that has died with Ctrl-C is not waited for
                async with asyncio.timeout(LAST_BOOKING_S):
                    await model.book_costs()
            show_costs(console, model.costs)
        summary |= {"step": await model.get_step(), "rewards": [report.reward for report in reports]}
        summary["costs"] = model.costs.summary()
    summary["wall_s"] = time.perf_counter() - started
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return EXIT_BUDGET if summary["stopped"] else 0


async def _evaluate(console: Console, model: TrainableModel, task: Task, args: argparse.Namespace) -> dict[str, object]:
    evaluation = await evaluate(
        model, task, count=args.evaluate, seed=args.seed, rollout_timeout_s=args.rollout_timeout
    )  # fmt: skip
    await model.log(evaluation.trajectories, split="test")
    low, high = evaluation.interval
    console.print(
        f"{task.headline_metric} on {len(evaluation.trajectories)} held-out rollouts: {evaluation.mean:.3f} ({low:.3f} "
        f"to {high:.3f})"
    )
    return {"evaluation": evaluation.mean, "interval": list(evaluation.interval)}
