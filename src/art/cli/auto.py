"""`art auto "what the agent should do" --model M`: train an agent from one sentence.

write inputs and a system prompt --> train with RULER --> judge held-out inputs, before beside after --> report

All of it is kept in readable files in the folder of `--out`: task.toml, scenarios.jsonl, run.toml. Edit them and run
`art auto FOLDER`: nothing is written anew, and training goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from art.backends.local import LocalBackend
from art.cli.auto_files import RunOptions, folder_of, inside
from art.cli.auto_report import describe_run
from art.cli.judged_run import Clock, JudgedRun, train_and_compare
from art.cli.options.cost_options import add_cost_options, judge_settings, prices_of
from art.cli.options.judged_options import add_evaluation_options, add_generator_options, add_place_options
from art.cli.options.train_options import (
    add_judge_options,
    add_loop_options,
    add_model_options,
    make_judge,
    model_settings,
)
from art.cli.terminal.event_loop import run_coroutine
from art.cli.terminal.screen import Screen
from art.costs import Ledger
from art.errors import ConfigError
from art.model import TrainableModel
from art.rewards import JudgeSettings, params_at
from art.rewards.ruler import DEFAULT_JUDGE
from art.scenarios import Dataset, Writer, generate_dataset, generate_inputs, with_splits
from art.scenarios.dataset import TASK_FILE
from art.scenarios.generate import DEFAULT_NUM
from art.storage.layout import DataDir
from art.tasks.dataset import DatasetTask

PREVIEW = 5
_PREVIEW_CHARS = 110


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "auto", help="train an agent from one sentence", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("what", help="what the agent should do, in a sentence; or the folder of an earlier call")
    parser.add_argument(
        "--model", "--base-model", dest="base_model", metavar="M", help="what to train: hub id or local path of a model"
    )
    parser.add_argument("--name", help="of the trained model (default: that of the folder)")
    add_place_options(parser, project="auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help="task, scenarios and report (default: after the task)")
    defaults = DatasetTask.defaults
    add_loop_options(
        parser,
        whose=f"steps {defaults.num_steps}, groups {defaults.groups_per_step}, rollouts {defaults.rollouts_per_group}",
    )
    add_model_options(parser)
    group = parser.add_argument_group("scenarios", "written once, into files that may be edited")
    group.add_argument(
        "--num-scenarios", type=int, metavar="N",
        help=f"to have in all (default: {DEFAULT_NUM}, or those that there are); missing ones are written",
    )  # fmt: skip
    add_generator_options(group)
    group.add_argument("--write-only", action="store_true", help="write the files and stop, to look at them first")
    add_judge_options(parser, "a language model scores the answers to each input", default=DEFAULT_JUDGE)
    add_cost_options(parser)
    add_evaluation_options(parser, "answers to each held-out input")
    parser.set_defaults(run=lambda args: run(args, parser))


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    console = Screen()
    out = folder_of(args.what, args.out)
    # What an earlier call was told holds where this one is told nothing.
    known = parser.parse_args(args.argv[1:], RunOptions.load(out).namespace())
    known.argv, known.name = args.argv, known.name or out.name
    known.data_dir = known.data_dir.resolve()
    if known.base_model is not None and Path(known.base_model).is_dir():
        known.base_model = str(Path(known.base_model).resolve())  # the next call may come from elsewhere
    try:
        return run_coroutine(_Auto(console, known, out).run())
    except KeyboardInterrupt:
        console.print(f"Stopped. Every finished step is kept; `art auto {inside(out)}` continues")
        return 130


@dataclass(slots=True)
class _Auto:
    """One call of the command."""

    console: Console
    args: argparse.Namespace
    out: Path

    async def run(self) -> int:
        args = self.args
        if not args.write_only and args.base_model is None:
            raise ConfigError("say what to train by `--model`; or `--write-only` to have the files written first")
        self._check_files()
        if args.write_only:
            await self._files()
            self.console.print(f"Edit them as you like, then: art auto {inside(self.out)} --model ...", highlight=False)
            return 0
        model: TrainableModel[Any, Any] = TrainableModel(
            name=args.name, project=args.project, base_model=args.base_model, base_path=str(args.data_dir),
            settings=model_settings(args), prices=prices_of(args), budget_usd=args.budget,
        )  # fmt: skip
        make_judge(args, args.data_dir, model.costs)  # one that cannot be asked ends it before anything is paid
        self.out.mkdir(parents=True, exist_ok=True)
        clock = Clock.load(self.out)
        async with LocalBackend(path=args.data_dir) as backend:
            # And so does a base model that is missing, or that cannot be trained here.
            with clock.measure("starting"), self.console.status("Starting server, engine and trainer ..."):
                await model.register(backend)
            dataset = await self._files()
            task, num_val = _task_of(dataset, args.seed), len(dataset.split("val"))
            judge = make_judge(args, args.data_dir, model.costs, rubric=dataset.task.rubric)
            clock = Clock.load(self.out)
            run = JudgedRun(
                args=args, command=f"art auto {inside(self.out)}", model=model, clock=clock,
                step=await model.get_step(),
            )  # fmt: skip
            return await train_and_compare(
                run, task, judge, self.console, out=self.out, about=_digest(dataset),
                held_out=task.scenarios("test", seed=args.seed, count=len(dataset.scenarios)),
                validation=task.scenarios("val", seed=args.seed, count=num_val) if num_val else [],
                describe=lambda: describe_run(run, dataset),
            )  # fmt: skip

    def _check_files(self) -> None:
        """
        Raises:
            ConfigError: the files that are there, or the number of those to be written, cannot be trained with.
        """
        args = self.args
        if not (self.out / TASK_FILE).exists():
            if args.num_scenarios is not None and args.num_scenarios < 2:
                raise ConfigError(
                    f"--num-scenarios must be 2 or more, one to train on and one to test with; got {args.num_scenarios}"
                )
            return
        dataset = self._load()
        if not args.write_only and (args.num_scenarios or 0) <= len(dataset.scenarios):
            _task_of(dataset, args.seed)

    async def _files(self) -> Dataset:
        """Write what is missing, keep the options of this call, and show what there is."""
        dataset = await self._dataset()
        RunOptions.of(self.args).save(self.out)
        self._show(dataset)
        return dataset

    async def _dataset(self) -> Dataset:
        """The files as they are; or else new ones."""
        args = self.args
        if not (self.out / TASK_FILE).exists():
            return await self._write_new()
        dataset = self._load()
        missing = (args.num_scenarios or 0) - len(dataset.scenarios)
        if missing <= 0:
            return dataset
        known = [scenario.input for scenario in dataset.scenarios]
        writer = self._writer()
        with self.console.status(f"{writer.name} writes {missing} scenarios more ..."):
            new = await generate_inputs(
                dataset.task.description, missing, writer, instructions=args.instructions, known=known
            )
        dataset = replace(dataset, scenarios=[*dataset.scenarios, *with_splits(new)])
        dataset.save(self.out)
        return dataset

    def _load(self) -> Dataset:
        args = self.args
        if args.judge_rubric is not None:
            raise ConfigError(
                f"the rubric stands in {self.out / TASK_FILE} by now: edit it there, and leave out --judge-rubric"
            )
        dataset = Dataset.load(self.out)
        described = dataset.task.description
        if not Path(args.what).is_dir() and args.what.split() != described.split():
            raise ConfigError(
                f"{self.out} holds another task: {described!r}. Give another `--out`, or go on with that one by "
                f"`art auto {inside(self.out)}`"
            )
        return dataset

    async def _write_new(self) -> Dataset:
        args = self.args
        num = DEFAULT_NUM if args.num_scenarios is None else args.num_scenarios
        rubric = None if args.judge_rubric is None else args.judge_rubric.read_text(encoding="utf-8")
        self.out.mkdir(parents=True, exist_ok=True)
        writer, clock = self._writer(), Clock.load(self.out)
        with clock.measure("writing scenarios"), self.console.status(f"{writer.name} writes {num} scenarios ..."):
            dataset = await generate_dataset(args.what, num, writer, instructions=args.instructions)
        if rubric is not None:
            dataset = replace(dataset, task=dataset.task.model_copy(update={"rubric": rubric.strip()}))
        dataset.save(self.out)
        return dataset

    def _writer(self) -> Writer:
        """`--generator`, or else the judge."""
        args = self.args
        model, url = (args.generator, args.generator_url) if args.generator else (args.judge, args.judge_url)
        ledger = Ledger(args.budget, path=DataDir(args.data_dir).model(args.project, args.name).costs)
        # A price that was given is the judge's: of another model litellm has to know it.
        settings = JudgeSettings(budget=ledger) if args.generator else judge_settings(args, JudgeSettings(), ledger)
        return Writer(model, extra_litellm_params=params_at(url), settings=settings)

    def _show(self, dataset: Dataset) -> None:
        for scenario in dataset.scenarios[:PREVIEW]:
            text = " ".join(scenario.input.split())
            text = text if len(text) <= _PREVIEW_CHARS else f"{text[: _PREVIEW_CHARS - 3]}..."
            self.console.print(f"  {text}", highlight=False, soft_wrap=True)
        self.console.print(dataset.summary(), highlight=False, soft_wrap=True)
        for warning in dataset.warnings():
            self.console.print(f"note: {warning}", style="yellow", highlight=False, soft_wrap=True)
        self.console.print(f"files   {inside(self.out)}", highlight=False, soft_wrap=True)


def _task_of(dataset: Dataset, seed: int) -> DatasetTask:
    """
    Raises:
        ConfigError: there is nothing to train on, or nothing to test with.
    """
    task = DatasetTask(dataset)
    for split in ("train", "test"):
        task.scenarios(split, seed=seed, count=1)
    return task


def _digest(dataset: Dataset) -> str:
    """What the scores of held-out inputs depend on besides the inputs."""
    return hashlib.sha256(dataset.task.model_dump_json().encode()).hexdigest()[:16]
