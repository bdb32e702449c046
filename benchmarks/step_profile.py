"""The operators that take most time in a step of `real_shapes`, by torch's profiler.

Steps run until everything is compiled, then one is profiled: a group of completions that share a prompt. Models with
two layers are profiled unless others are named.

    python -m benchmarks step_profile --quick
    python -m benchmarks step_profile --device cuda --models "4 B" --profile-tree 16384
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import LORA, SHAPES, choose_dtype
from benchmarks.real_shapes import QUICK_TREE, TREES, chosen_models, is_deep, make_workloads, open_trainer
from benchmarks.report import Cell, Result

_NUM_WARM_UPS = 2
_NUM_OPERATORS = 15


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--profile-tree", type=int, metavar="N", help="tokens of the tree (default: 16384 on cuda)")


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    names = args.models or chosen_models(args)[:2]
    return Result(
        summary=f"Operators of one optimiser step in {choose_dtype(args)} on {args.device}, LoRA rank {LORA.rank}.",
        rows=[row for name in names for row in _profile(name, args)],
        notes=[
            "self: time in the operator itself, on the GPU in its kernels; share: of the sum over all operators",
            f"the {_NUM_OPERATORS} operators with the largest share are listed",
        ],
    )


def _profile(name: str, args: argparse.Namespace) -> Iterator[dict[str, Cell]]:
    num_tokens = args.profile_tree or (QUICK_TREE if args.quick else TREES[args.device][0])
    workload, samples = next(iter(make_workloads(num_tokens, SHAPES[name]["vocab_size"]).items()))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if args.device == "cuda" else [])]
    with open_trainer(name, args, max_tokens=num_tokens, recomputes=is_deep(name)) as trainer:
        for _ in range(_NUM_WARM_UPS):
            trainer.trial(samples, LORA)
        with profile(activities=activities) as profiler:
            trainer.trial(samples, LORA)
    times = {event.key: (_self_us(event, args.device), event.count) for event in profiler.key_averages()}
    total = sum(time for time, _ in times.values())
    for operator, (time, count) in sorted(times.items(), key=lambda item: -item[1][0])[:_NUM_OPERATORS]:
        yield {
            "model": name,
            "workload": f"{workload}, {num_tokens} tokens",
            "operator": operator[:70].replace("|", " "),
            "calls": count,
            "self ms": time / 1e3,
            "share": time / total,
        }


def _self_us(event: Any, device: str) -> float:
    """Microseconds in the operator itself. On CUDA only kernels count: the operators that launch them repeat it."""
    if device == "cpu":
        return float(event.self_cpu_time_total)
    return float(event.self_device_time_total) if event.device_type == torch.autograd.DeviceType.CUDA else 0.0


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["step_profile", *sys.argv[1:]])
