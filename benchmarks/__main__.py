"""Run benchmarks and show what they measured, as Markdown.

    python -m benchmarks                                      all but those that run only when named
    python -m benchmarks train_step --repeats 9 --json out.json
    python -m benchmarks grpo_step growth --quick             a tiny model and small sizes: whether it works
    python -m benchmarks.train_step --json out.json           the same as `python -m benchmarks train_step ...`

Each benchmark runs in a process of its own. With `--json out.json` the tables are also written to `out.json` and
`out.md`, and the plots beside them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import models
from benchmarks.report import Result, environment, environment_markdown, markdown, to_json
from benchmarks.worker import end_with_parent

REAL_SHAPES = ("real_shapes", "step_profile")
"""For a GPU: `make bench-gpu` runs them. Elsewhere they run only when named."""

DEFAULT = (
    "gateway_overhead",
    "client_overhead",
    "generate",
    "train_step",
    "grpo_step",
    "logprobs",
    "head",
    "growth",
    "grammar",
    "constraints",
)
ONLY_NAMED = (
    "tasks",
    "judged",
    "judge_passes",
    "verdicts",
    "mcp_rl",
    "cluster",
    "cluster_learning",
    "cluster_storm",
    "agent_storm",
    "chores_learning",
    "kill_storm",
    "remote_storm",
    "pipeline_storm",
    "power_cut",
    "serve_load",
    "chat_cost",
    "greedy",
    "fairness",
    "memory_forecast",
    "gate",
    "gate_stale",
    "overlap",
    "transport",
    "handshake",
    "from_rewards",
    "live_watchers",
    "page_open",
    "viewer",
    "token_file",
    "long_prompts",
    "pipeline",
    "sharing",
)

ALL = (*DEFAULT, *ONLY_NAMED, *REAL_SHAPES)

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "agg",
}
"""Of the processes that measure. Threads that wait actively disturb everything else on the machine; transformers warns
of what peft calls."""


def main(argv: Sequence[str]) -> None:
    """Run what `argv` (without the program's name) says."""
    os.environ.update(ENVIRONMENT)
    named = [word for word in argv if word in ALL]
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in named or ALL}
    parser = make_parser(modules, options_of=named or DEFAULT)
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(ALL)):
        parser.error(f"unknown benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    if args.plot and len(args.names) != 1:
        parser.error("--plot takes the plot of one benchmark: name it")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU")
    about = environment(args.device, argv)
    print(environment_markdown(about), flush=True)
    results: dict[str, Result] = {}
    sections = [environment_markdown(about)]
    for name in args.names or DEFAULT:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
            results[name] = pool.submit(modules[name].run, args).result()
        if not results[name].rows:
            parser.error(f"{name} measured nothing: no workload, model or load fits what you named")
        section = markdown(name, results[name])
        print(section, flush=True)
        if args.json:  # before the plot: figures that took long are not lost with it
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(to_json(about, results), indent=1) + "\n")
        if path := plot_path(name, args.plot, args.json):
            section += draw(modules[name], results[name], path)
        sections.append(section)
        if args.json:
            args.json.with_suffix(".md").write_text("\n".join(sections))


def plot_path(name: str, plot: Path | None, json_file: Path | None) -> Path | None:
    """Where the plot of benchmark `name` goes: `plot`, else beside `json_file`, told apart by its name."""
    if plot is not None:
        return plot
    if json_file is None:
        return None
    return json_file.with_name(f"{name}.png" if json_file.stem == name else f"{json_file.stem}.{name}.png")


def draw(module: ModuleType, result: Result, path: Path) -> str:
    """Write the plot of `result`, if the benchmark draws one; the line of Markdown that shows it."""
    if not hasattr(module, "draw"):
        return ""
    if not find_spec("matplotlib"):
        print(f"matplotlib is not installed: {path} was not drawn", file=sys.stderr, flush=True)
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    module.draw(result).savefig(path, dpi=110)
    return f"\n![{path.stem}]({path.name})\n"


def make_parser(modules: dict[str, ModuleType], options_of: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Make the parser that lists `modules`, with the options of some of them, by default of all.

    Benchmarks that run only when named may have options of the same name, and cannot be named together then.
    """
    listing = [
        f"  {name:<18}{(module.__doc__ or '').splitlines()[0]}{' (only when named)' if name not in DEFAULT else ''}"
        for name, module in modules.items()
    ]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="\n".join(["Measure ART on this machine.", "", "benchmarks:", *listing]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="benchmarks to run (default: all but those that run only when named)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, tables and plots beside it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="of a single benchmark: write its plot here instead")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds (default: 5)")
    parser.add_argument("--quick", action="store_true", help="smaller models and sizes: whether it works at all")
    models.add_options(parser.add_argument_group("models"))
    for name in modules if options_of is None else options_of:
        if hasattr(modules[name], "add_options"):
            modules[name].add_options(parser.add_argument_group(name))
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
