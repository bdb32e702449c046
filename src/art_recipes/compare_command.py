"""`art compare TASK --models A,B,...`: compare models on the same held-out scenarios of a task.

    art compare tic_tac_toe --models scripted,tiny
    art compare tic_tac_toe --models agent@latest,agent@0,openai/gpt-5
    art compare shop.py:Shop --models llama3=http://gpu:8000/v1#GPU_KEY

A model is `scripted`, `tiny`, PROVIDER/MODEL, MODEL=URL#KEY_VARIABLE, NAME@STEP or PROJECT/NAME@STEP of the data
directory (step 0 is the base, `latest` the newest), a folder or a hub id. Rollouts that fail get no score and are
counted. Ctrl-C keeps every finished rollout, and the same command goes on.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from art.cli.arguments import TASK_HELP, add_task_options, options_of
from art.cli.output import EXIT_NO_SCORE, EXIT_WORSE, run_coroutine
from art.client.terminal import EXIT_INTERRUPTED, stopped
from art.costs import TokenPrice
from art.errors import ConfigError
from art.task import Task, draw_scenarios, get_task
from art.task.names import other_task
from art.task.options import is_tiny_model
from art.testing.scripted_model import ScriptedModel
from art_recipes.arguments import add_settings, config_of, task_for
from art_recipes.comparing.compare_models import compare_models, comparison_folder, registered
from art_recipes.comparing.compared_models import (
    BaseModel,
    Checkpoint,
    CompareConfig,
    ComparedModel,
    OwnModel,
    check_labels,
    parse_model,
)
from art_recipes.comparing.model_comparison import (
    JSON_FILE,
    SCORE_COLUMNS,
    ModelComparison,
    cells,
    columns,
    heading,
    read_comparison,
    remarks,
)
from art_recipes.screen import ProgressPrinter, Screen, print_page_line
from art_recipes.tiny_model_command import build_with_progress, default_folder

MADE_FOR_THE_TASK = ("scripted", "tiny")
WIDTH = 140
"""Characters of a table's line where the output is no terminal."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help=TASK_HELP)
    add_task_options(parser)
    parser.add_argument(
        "--models", nargs="+", required=True, metavar="MODEL", help="models, with commas or spaces between them"
    )
    what = ("held_out", "rollouts", "seed", "split", "reference", "data_dir", "out")
    add_settings(parser, CompareConfig, *what)
    parser.add_argument(
        "--require", type=float, metavar="LOW",
        help="end with exit code 5 unless each model's difference from the reference has a low end of at least LOW: "
        "0 for certainly better, --require=-0.05 for certainly not worse by 0.05",
    )  # fmt: skip
    asking = parser.add_argument_group("requests", "how models are asked")
    add_settings(asking, CompareConfig, "concurrency", "call_timeout", "attempts", "rollout_timeout", "max_tokens")
    costs = parser.add_argument_group("costs", "a price that is not known is shown as such, never as 0")
    costs.add_argument(
        "--price", nargs="+", default=[], metavar="MODEL=USD,USD",
        help="USD per million prompt and completion tokens of a model, by its label",
    )  # fmt: skip
    add_settings(costs, CompareConfig, "price_per_hour")


def run(args: argparse.Namespace) -> int:
    console, config = Screen(), config_of(CompareConfig, args)
    data_dir = config.data_dir.resolve()
    texts = [text for part in args.models for text in part.split(",") if text]
    named = {text: parse_model(text, data_dir) for text in texts if text not in MADE_FOR_THE_TASK}
    task = _task(console, args, "tiny" in texts, list(named.values()), data_dir)
    models = [named.get(text) or _made(console, text, task, data_dir, config.seed) for text in texts]
    models = _priced(models, args.price)
    folder = comparison_folder(task, config)
    try:
        with ProgressPrinter(console) as printer:
            update = partial(_update, printer)
            result = run_coroutine(compare_models(task, models, config=config, on_progress=printer, on_update=update))
    except KeyboardInterrupt:
        console.print(f"\n{stopped()}; the same command goes on", highlight=False, soft_wrap=True)
        if (folder / JSON_FILE).exists():
            _show(console, read_comparison(folder), folder)
        return EXIT_INTERRUPTED
    _show(console, result, folder)
    if config.out is None:
        print_page_line(console, data_dir)
    if any(row.headline is None for row in result.models):
        return EXIT_NO_SCORE
    worse = [] if args.require is None else _worse(result, args.require)
    for line in worse:
        console.print(line, style="red", highlight=False, soft_wrap=True)
    return EXIT_WORSE if worse else 0


def _worse(comparison: ModelComparison, require: float) -> list[str]:
    """Say which models miss a requirement on their difference from the reference."""
    lines = []
    for row in comparison.models:
        found = row.difference
        if row.label != comparison.reference and (found is None or found.low is None or found.low < require):
            said = "unknown" if found is None else found.text(sign=True)
            lines.append(f"{row.label} minus {comparison.reference}: {said}; the low end must be {require:+g} or above")
    return lines


def _task(
    console: Console, args: argparse.Namespace, makes_tiny: bool, models: list[ComparedModel], data_dir: Path
) -> Task:
    """Make the task. All models play the same form of it: the one for tiny models if one of them is tiny."""
    paths = [registered(model, data_dir)[0] for model in models if isinstance(model, Checkpoint)]
    paths += [model.path for model in models if isinstance(model, BaseModel)]
    tiny = [path for path in paths if is_tiny_model(path)]
    if not tiny and not makes_tiny:
        return get_task(args.task, options_of(args))
    task = task_for(console, args, tiny[0] if tiny else None)
    for path in tiny[1:]:
        if warning := other_task(task, path):
            console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    return task


def _made(console: Console, word: str, task: Task, data_dir: Path, seed: int) -> ComparedModel:
    """Make the model of a word in `MADE_FOR_THE_TASK`."""
    if word == "scripted":
        task.player(draw_scenarios(task, "test", seed=seed, count=1)[0])  # raises if the task has none
        return OwnModel(label=word, model=ScriptedModel(task))
    path = default_folder(data_dir, task, seed=seed, head_dim=16)
    if not (path / "model.safetensors").exists():
        build_with_progress(console, path, task=task, seed=seed)
    return BaseModel(label=word, path=str(path))


def _priced(models: list[ComparedModel], prices: list[str]) -> list[ComparedModel]:
    """Return the models with the prices of `--price`."""
    check_labels(models)
    by_label = {model.label: model for model in models}
    for text in prices:
        label, has_price, numbers = text.rpartition("=")
        if not has_price or label not in by_label:
            raise ConfigError(
                f"--price {text}: expected MODEL=PROMPT,COMPLETION, where MODEL is one of {', '.join(by_label)}"
            )
        try:
            prompt, completion = [float(number) for number in numbers.split(",")]
        except ValueError:
            prompt, completion = -1.0, -1.0
        if min(prompt, completion) < 0:
            raise ConfigError(
                f"--price {text}: a price is two numbers, USD per million prompt and completion tokens; e.g. "
                f"{label}=1.25,10"
            )
        by_label[label] = replace(by_label[label], price=TokenPrice(prompt=prompt, completion=completion))
    return list(by_label.values())


def _update(line: ProgressPrinter, comparison: ModelComparison) -> None:
    """Show the rollouts of all models that have ended, and the score of each model so far."""
    done = sum(row.num_rollouts + row.num_failed_rollouts for row in comparison.models)
    total = len(comparison.models) * comparison.num_scenarios * comparison.rollouts_per_scenario
    if line.what != "rollouts":
        line.begin("rollouts", done, total)
    scores = [f"{row.label} {row.headline.mean:.2f}" for row in comparison.models if row.headline is not None]
    failed = sum(row.num_failed_rollouts for row in comparison.models)
    about = [f"{comparison.headline_metric}: {', '.join(scores)}"] * bool(scores) + [f"{failed} failed"] * bool(failed)
    line.update(done, total, "  ".join(about))


def _show(console: Console, comparison: ModelComparison, folder: Path) -> None:
    """Print the table of a comparison and what the table hides."""
    console.print(heading(comparison), highlight=False, soft_wrap=True)
    wide = console if console.is_terminal else Screen(width=WIDTH, file=console.file)  # a file needs no line breaks
    labels = [row.label for row in comparison.models]
    rows = [cells(comparison, row)[1:] for row in comparison.models]
    for part in (slice(0, SCORE_COLUMNS), slice(SCORE_COLUMNS, None)):  # two tables fit into a terminal, one does not
        table = Table("model", *columns(comparison)[1:][part])
        for label, texts in zip(labels, rows, strict=True):
            table.add_row(label, *texts[part])
        wide.print(table)
    for remark in remarks(comparison):
        console.print(remark, highlight=False, soft_wrap=True)
    console.print(f"numbers     {folder / JSON_FILE}", highlight=False, soft_wrap=True)
    console.print(f"rollouts    {folder / 'rollouts'}", highlight=False, soft_wrap=True)
