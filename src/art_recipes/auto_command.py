"""`art auto "what the agent should do" --model M`: train an agent from one sentence.

write inputs and a system prompt --> train with RULER --> judge held-out inputs before and after --> report

RULER is a language model that compares the answers to one input. All of it is kept in readable files in the folder of
`--out`: task.toml, scenarios.jsonl. Edit them and run the same command again: the files are used as they are, and
training goes on where it stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from art.cli.output import run_coroutine
from art.model.run_settings import command_line
from art_recipes.arguments import add_recipe_options, add_settings, config_of
from art_recipes.autorl import AutoConfig, auto, folder_of, inside, write_task
from art_recipes.dataset_task import DatasetTask
from art_recipes.screen import ProgressPrinter, Screen, exit_code, print_page_line


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", help="what the agent should do, in a sentence; or the folder of an earlier call")
    parser.add_argument(
        "--model", "--base-model", dest="base_model", metavar="M", help="what to train: hub id or local path of a model"
    )
    parser.add_argument("--out", metavar="DIR", help="task, scenarios and report (default: after the task)")
    judged = "a language model scores the answers to each input"
    add_settings(parser, AutoConfig, "held_out_rollouts")
    add_recipe_options(parser, AutoConfig, judged, DatasetTask.defaults)
    group = parser.add_argument_group("scenarios", "written once, into files that may be edited")
    add_settings(group, AutoConfig, "num_scenarios", "generator", "generator_url", "instructions")
    group.add_argument("--write-only", action="store_true", help="write the files and stop, to look at them first")


def run(args: argparse.Namespace) -> int:
    console, config = Screen(), config_of(AutoConfig, args)
    folder = inside(folder_of(args.what, args.out))
    try:
        with ProgressPrinter(console) as printer:
            if args.write_only:
                run_coroutine(write_task(args.what, out=args.out, config=config, on_progress=printer))
                console.print(f"Edit them as you like, then: art auto {folder} --model ...", highlight=False)
                return 0
            command = command_line(["art", *args.argv])
            result = run_coroutine(auto(args.what, out=args.out, config=config, on_progress=printer, command=command))
        print_page_line(console, Path(result.model.base_path))
        return exit_code(result)
    except KeyboardInterrupt:
        console.print("Stopped. Every finished step is kept; the same command continues")
        return 130
