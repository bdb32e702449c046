"""A whole optimiser step at the shapes of a 4 B model: time, memory, and the share of the arithmetic limit.

Each row is `Trainer.trial`: pack, lay out, forward, backward, AdamW on a fresh adapter. On CUDA the trees have 16,384
and 65,536 tokens; the models are two layers of Qwen3-4B, the same with a sliding window in the second layer, and the
whole of it (at 16,384 tokens):

    group        a prompt and 8 completions that share it: the tree has the stated number of tokens
    plain row    one sequence of as many tokens, half of them learnt

The limit is the arithmetic that the shapes need, divided by the device's peak: two operations per weight and token
forward and two backward (the base is frozen), 12 per visible key, head feature and query of attention, and four per
weight of the head and learnt query. Computing activations again is not counted, so it lowers the share.

    python -m benchmarks real_shapes --quick                                   a tiny model on the CPU, seconds
    python -m benchmarks real_shapes --device cuda --json out.json             the real ones
    python -m benchmarks real_shapes --device cuda --models "4 B 2 layers" --trees 16384 --checkpointing yes
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from art.config import TrainerConfig
from art.trainer.trainer import Trainer
from art.trainer.tree import PrefixTree, build_tree, check_sample
from benchmarks.models import LORA, SHAPES, backbone_weights, choose_dtype, model_files
from benchmarks.report import Cell, Result, Spread
from benchmarks.workloads import Samples, group, plain_row

MODELS = {"cpu": ["0.1 M", "0.1 M window"], "cuda": ["4 B 2 layers", "4 B 2 layers window", "4 B"]}
TREES = {"cpu": (2048,), "cuda": (16_384, 65_536)}
QUICK_TREE = 600
_FEW_LAYERS = 4
"""A deeper model computes activations again by default, and runs the smallest tree only."""
_COMPLETIONS = 8

PRIME_RL = 6_547
"""Tokens per second that prime-rl publishes for Qwen3-4B with LoRA of rank 16 at 16,384 tokens on one GPU."""


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trees", type=_numbers, metavar="N,N", help="tokens of a tree (default: 16384,65536 on cuda)")
    group.add_argument(
        "--checkpointing",
        choices=("yes", "no"),
        help="compute activations again in the backward pass (default: for models of more than 4 layers)",
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    rows = [row for name in chosen_models(args) for row in _measure_model(name, args)]
    return Result(
        summary=f"One optimiser step in {choose_dtype(args)} on {args.device}, LoRA rank {LORA.rank}.",
        rows=rows,
        notes=[
            "tokens/s: of the tree, where shared tokens count once; effective: shared ones counted in each sample",
            "limit: tokens/s if the arithmetic that the shapes need ran at the device's peak; share: reached of it",
            "peak GB: allocated on a GPU; on a CPU what the process ever had resident",
            f"for comparison, prime-rl publishes {PRIME_RL:,} tokens/s: Qwen3-4B, LoRA of rank 16, rows of 16,384 "
            "tokens, one GPU; the same work is the plain row of the whole 4 B model",
        ],
        clock="wall",
    )


def chosen_models(args: argparse.Namespace) -> list[str]:
    names: list[str] = args.models or MODELS["cpu" if args.quick else args.device]
    return names


def _chosen_trees(name: str, args: argparse.Namespace) -> tuple[int, ...]:
    if args.trees:
        trees: tuple[int, ...] = args.trees
        return trees
    trees = (QUICK_TREE,) if args.quick else TREES[args.device]
    return trees[:1] if is_deep(name) else trees


def make_workloads(num_tokens: int, vocab_size: int) -> dict[str, Samples]:
    """Samples whose trees have `num_tokens` tokens, by name."""
    answer = num_tokens * 3 // 4 // _COMPLETIONS
    prompt = num_tokens - _COMPLETIONS * (answer - 1)  # the last token of a completion is not computed
    return {
        f"group of {_COMPLETIONS}": group(random.Random(0), vocab_size, prompt, _COMPLETIONS, answer),
        "plain row": [plain_row(num_tokens, num_tokens // 2, vocab_size)],
    }


@contextmanager
def open_trainer(name: str, args: argparse.Namespace, *, max_tokens: int, recomputes: bool) -> Iterator[Trainer]:
    """A trainer of model `name` with `max_tokens` in a pass. With `recomputes` activations are computed again."""
    settings: dict[str, Any] = {
        "device": args.device,
        "dtype": choose_dtype(args),
        "max_tokens": max_tokens,
        "gradient_checkpointing": recomputes,
        "num_threads": 1,
    }
    with model_files(name, args.device) as files:
        yield Trainer(str(files.base), TrainerConfig.model_validate(settings))


def is_deep(name: str) -> bool:
    """Whether a model has more layers than fit into memory with all their activations."""
    return SHAPES[name]["num_hidden_layers"] > _FEW_LAYERS


def _peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of a large matrix product."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        float((a @ b)[0, 0])  # reading a number waits until the device is done
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)


def _measure_model(name: str, args: argparse.Namespace) -> Iterator[dict[str, Cell]]:
    peak = _peak_flops(torch.device(args.device), getattr(torch, choose_dtype(args)))
    vocab_size = SHAPES[name]["vocab_size"]
    trees = _chosen_trees(name, args)
    recomputes = is_deep(name) if args.checkpointing is None else args.checkpointing == "yes"
    with open_trainer(name, args, max_tokens=max(trees), recomputes=recomputes) as trainer:
        for num_tokens in trees:
            for workload, samples in make_workloads(num_tokens, vocab_size).items():
                results = [trainer.trial(samples, LORA) for _ in range(args.repeats + 1)][1:]  # the first one compiles
                yield {"model": name, "workload": workload} | _row(name, samples, results, peak)


def _row(name: str, samples: Samples, results: list[dict[str, float]], peak: float) -> dict[str, Cell]:
    times = [result["seconds"] for result in results]
    seconds, tree = statistics.median(times), tree_of(samples, SHAPES[name]["vocab_size"])
    least = needed_operations(name, tree) / peak
    return {
        "tree tokens": len(tree),
        "seconds": Spread.of(times),
        "tokens/s": round(len(tree) / seconds),
        "effective tokens/s": round(results[0]["num_tokens"] / seconds),
        "limit tokens/s": round(len(tree) / least),
        "share of limit": least / seconds,
        "peak GB": max(result["peak_memory_bytes"] for result in results) / 1e9,
    }


def tree_of(samples: Samples, vocab_size: int) -> PrefixTree:
    return build_tree([path for sample in samples if (path := check_sample(sample, vocab_size=vocab_size))])


def needed_operations(name: str, tree: PrefixTree) -> float:
    """Floating-point operations of a forward and backward pass over `tree` with a frozen base, from shapes alone."""
    shape = SHAPES[name]
    layers, features = shape["num_hidden_layers"], shape["num_attention_heads"] * shape["head_dim"]
    visible = tree.positions + 1  # keys of each query
    full = shape["max_window_layers"] if "sliding_window" in shape else layers
    in_window = np.minimum(visible, shape.get("sliding_window", 0)).sum() * (layers - full)
    head = shape["vocab_size"] * shape["hidden_size"] * len(np.unique(tree.targets.queries))
    return float(4 * (backbone_weights(name) * len(tree) + head) + 12 * features * (visible.sum() * full + in_window))


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["real_shapes", *sys.argv[1:]])
