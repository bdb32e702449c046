"""`art train TASK`: the demo's loop without the show, on any base model; continues where the last call stopped."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console

from art.backends.local import LocalBackend
from art.cli.event_loop import run_coroutine
from art.cli.tiny_model import build_with_progress
from art.cli.train_options import (
    add_judge_options,
    add_loop_options,
    add_model_options,
    loop_defaults,
    make_judge,
    model_settings,
)
from art.model import TrainableModel
from art.rewards import GroupScorer
from art.task import Task, get_task
from art.training_loop import StepReport, evaluate, train_task


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train", help="train a task's agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", help="task name, or module:attribute of your own Task")
    parser.add_argument("--base-model", help="hub id or local path (default: a tiny model made for the task)")
    parser.add_argument("--name", help="model name (default: <task>-seed<seed>)")
    parser.add_argument("--project", help="project name (default: the task's name)")
    parser.add_argument("--data-dir", type=Path, default=Path(".art"), help="where everything is kept (default: .art)")
    add_loop_options(parser)
    add_model_options(parser)
    add_judge_options(
        parser, "a language model scores the rollouts of each scenario, in place of the task's own reward"
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
        run_coroutine(_train(console, task, args, data_dir))
    except KeyboardInterrupt:
        console.print("Stopped. Every finished step is kept; the same command continues")
        return 130
    return 0


async def _train(console: Console, task: Task, args: argparse.Namespace, data_dir: Path) -> None:
    started = time.perf_counter()
    defaults = loop_defaults(task.defaults, args)
    scorer = None if args.judge is None else GroupScorer(make_judge(args, data_dir))
    async with LocalBackend(path=data_dir) as backend:
        model = TrainableModel(
            name=args.name or f"{task.name}-seed{args.seed}",
            project=args.project or task.name,
            base_model=args.base_model,
            base_path=str(data_dir),
            settings=model_settings(args),
        )
        await model.register(backend)
        console.print(f"{model.get_inference_name()} stands at step {await model.get_step()} of {defaults.num_steps}")

        def on_step(report: StepReport) -> None:
            console.print(
                f"step {report.step:>4}  {report.line(task.headline_metric)}", highlight=False, soft_wrap=True
            )

        reports = await train_task(
            model, task, defaults, num_steps=defaults.num_steps, seed=args.seed, on_step=on_step,
            score=scorer,
        )  # fmt: skip
        summary: dict[str, object] = {
            "task": task.name, "seed": args.seed, "step": await model.get_step(),
            "rewards": [report.reward for report in reports],
        }  # fmt: skip
        if args.evaluate:
            evaluation = await evaluate(model, task, count=args.evaluate, seed=args.seed)
            low, high = evaluation.interval
            console.print(
                f"{task.headline_metric} on {args.evaluate} held-out rollouts: {evaluation.mean:.3f} ({low:.3f} to "
                f"{high:.3f})"
            )
            summary |= {"evaluation": evaluation.mean, "interval": list(evaluation.interval)}
    summary["wall_s"] = time.perf_counter() - started
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
