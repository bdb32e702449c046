"""Run benchmarks and show what they measured, as Markdown.

    python -m benchmarks                                      the quick ones
    python -m benchmarks train_step --repeats 9 --json out.json
    python -m benchmarks generation train_step --full         larger models too

Each benchmark runs in a process of its own, with one thread.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.report import Result, environment, environment_markdown, markdown, to_json

QUICK = ("gateway_overhead", "generation", "train_step")
SLOW = ("learning",)
"""Take minutes; run only when named."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore::FutureWarning"}
"""Of the processes that measure. Threads that wait actively disturb everything else on the machine; transformers warns
of what peft calls."""


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - {*QUICK, *SLOW}):
        parser.error(f"unknown benchmark {', '.join(unknown)}; there are {', '.join((*QUICK, *SLOW))}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU")
    about = environment(args.device)
    print(environment_markdown(about), flush=True)
    os.environ.update(ENVIRONMENT)
    results: dict[str, Result] = {}
    for name in args.names or QUICK:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            results[name] = pool.submit(importlib.import_module(f"benchmarks.{name}").run, args).result()
        print(markdown(name, results[name]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(to_json(about, results), indent=1) + "\n")


def make_parser() -> argparse.ArgumentParser:
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in (*QUICK, *SLOW)}
    listing = [
        f"  {name:<18}{(module.__doc__ or '').splitlines()[0]}{' (only when named)' if name in SLOW else ''}"
        for name, module in modules.items()
    ]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="\n".join(["Measure ART on this machine.", "", "benchmarks:", *listing]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: the quick ones)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, with date, machine and versions")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds (default: 5)")
    models = parser.add_argument_group("generation and train_step")
    models.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    models.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on cpu, bfloat16 on cuda")
    models.add_argument("--full", action="store_true", help="the larger model too (takes many minutes on a CPU)")
    for name, module in modules.items():
        if hasattr(module, "add_options"):
            module.add_options(parser.add_argument_group(name))
    return parser


if __name__ == "__main__":
    main()
