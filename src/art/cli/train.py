"""`art train TASK`: the demo's loop without the show, on any base model; continues where the last call stopped."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console

from art.backends.local import LocalBackend
from art.cli.options.cost_options import EXIT_BUDGET, add_cost_options, book_last, prices_of, show_costs
from art.cli.options.train_options import (
    add_judge_options,
    add_loop_options,
    add_model_options,
    loop_defaults,
    make_judge,
    model_settings,
)
from art.cli.terminal.event_loop import run_coroutine
from art.cli.terminal.screen import Screen
from art.cli.tiny_model import build_with_progress, default_folder
from art.cli.verdict import EXIT_UNTRAINED, Course, Remedies, change_of, reach_verdict, show_verdict
from art.client.interrupt import EXIT_INTERRUPTED, stopped
from art.errors import BudgetError
from art.model import TrainableModel
from art.recipes.training_loop import Evaluation, StepReport, evaluate, train_task
from art.rewards import GroupScorer
from art.task import Task, get_task


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
    add_cost_options(parser)
    parser.add_argument(
        "--evaluate",
        type=int,
        default=0,
        metavar="N",
        help="held-out rollouts before the first step and at the end (default: none)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary that scripts can read")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    task = get_task(args.task)
    console = Screen()
    data_dir: Path = args.data_dir.resolve()
    if args.base_model is None:
        # vLLM on CPU has no attention for the small heads of the usual one.
        head_dim = 32 if args.engine == "vllm" else 16
        path = default_folder(data_dir, task, seed=args.seed, head_dim=head_dim)
        if not (path / "model.safetensors").exists():
            build_with_progress(console, path, task=task, seed=args.seed, head_dim=head_dim)
        args.base_model = str(path)
    try:
        return run_coroutine(_train(console, task, args, data_dir))
    except KeyboardInterrupt:
        console.print(f"\n{stopped()}; run the same command again and it goes on", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED


async def _train(console: Console, task: Task, args: argparse.Namespace, data_dir: Path) -> int:
    started = time.perf_counter()
    defaults = loop_defaults(task.defaults, args)
    settings, prices = model_settings(args), prices_of(args)
    summary: dict[str, object] = {"task": task.name, "seed": args.seed, "stopped": None}
    model = TrainableModel(
        name=args.name or f"{task.name}-seed{args.seed}",
        project=args.project or task.name,
        base_model=args.base_model,
        base_path=str(data_dir),
        settings=settings,
        prices=prices,
        budget_usd=args.budget,
    )
    change = None
    scorer = None if args.judge is None else GroupScorer(make_judge(args, data_dir, model.costs))
    async with LocalBackend(path=data_dir) as backend:
        await model.register(backend)
        first = await model.get_step()
        console.print(f"{model.get_inference_name()} stands at step {first} of {defaults.num_steps}")
        reports: list[StepReport] = []
        before = await _evaluate(console, "before", model, task, args) if args.evaluate and first == 0 else None

        def on_step(report: StepReport) -> None:
            reports.append(report)
            console.print(
                f"step {report.step:>4}  {report.line(task.headline_metric)}", highlight=False, soft_wrap=True
            )

        try:
            await train_task(
                model, task, defaults, num_steps=defaults.num_steps, seed=args.seed, on_step=on_step,
                score=scorer, rollout_timeout_s=args.rollout_timeout,
            )  # fmt: skip
            if args.evaluate:
                after = await _evaluate(console, "after", model, task, args)
                summary |= {"evaluation": after.mean, "interval": list(after.interval)}
                if before is not None:
                    change = change_of(before, after)
                    summary |= {"evaluation_before": before.mean, "interval_before": list(before.interval)}
        except BudgetError as error:
            summary["stopped"] = "budget"
            console.print(f"Stopped at step {await model.get_step()}: {error}. Every finished step is kept",
                          highlight=False, soft_wrap=True)  # fmt: skip
        finally:
            step = first + sum(report.trained for report in reports)
            measure = "" if change is None else f"{task.headline_metric} on held-out rollouts"
            course = Course(
                step=step, num_steps=defaults.num_steps, reports=reports, measure=measure, change=change
            )  # fmt: skip
            if reports:
                show_verdict(console, reach_verdict(course, Remedies()))
            await book_last(model)
            show_costs(console, model.costs)
        summary |= {"step": await model.get_step(), "rewards": [report.reward for report in reports]}
        summary["costs"] = model.costs.summary()
    summary["wall_s"] = time.perf_counter() - started
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    if summary["stopped"]:
        return EXIT_BUDGET
    return EXIT_UNTRAINED if course.is_untrained else 0


async def _evaluate(
    console: Console, when: str, model: TrainableModel, task: Task, args: argparse.Namespace
) -> Evaluation:
    evaluation = await evaluate(
        model, task, count=args.evaluate, seed=args.seed, rollout_timeout_s=args.rollout_timeout
    )  # fmt: skip
    await model.log(evaluation.trajectories, split="test")
    low, high = evaluation.interval
    console.print(
        f"{task.headline_metric} on {len(evaluation.trajectories)} held-out rollouts {when} training: "
        f"{evaluation.mean:.3f} (95 %: {low:.3f} to {high:.3f})", highlight=False, soft_wrap=True,
    )  # fmt: skip
    return evaluation
