"""Log-probs of targets by a head of 151,936 tokens in bfloat16 against one in float32.

From hidden states [N, 2560], the hidden size of a 4 B model, to the log-prob of one target each, and back to the
gradient of the hidden states. Both heads hold the same numbers, rounded to bfloat16, so both should give the same
log-probs. Both are compared with a product in float64 on some of the targets.

    python -m benchmarks head_dtypes --quick
    python -m benchmarks head_dtypes --device cuda --head-targets 16384
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from art.protocol.samples import plain_sample
from art.trainer.machine.usage import peak_flops
from art.trainer.step.logprobs import Head, TargetRows, group_by_row, target_logprobs
from art.trainer.tree.tree import build_tree, check_sample
from benchmarks.memory import extra_peak_bytes
from benchmarks.report import Cell, Result, Spread
from benchmarks.timing import alternate, main_clock, median, ratio

_DTYPES = ("bfloat16", "float32")
_SHAPE, _QUICK_SHAPE = (151_936, 2560), (8192, 256)
_NUM_TARGETS = {"cpu": 64, "cuda": 16_384}
_NUM_COMPARED = 64
"""Targets whose log-probs are compared with float64."""


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--head-targets", type=int, metavar="N", help="log-probs (default: 16384 on cuda, 64 on cpu)")


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    shape = _QUICK_SHAPE if args.quick else _SHAPE
    bench = HeadBench(shape, args.head_targets or _NUM_TARGETS[args.device], args.device)
    peaks: dict[str, int] = {}

    def measure(dtype: str, number: int) -> None:
        if number > 0:
            bench.run(dtype)
        else:  # the round that is not counted
            peaks[dtype] = extra_peak_bytes(lambda: bench.run(dtype), args.device)

    contenders = {dtype: lambda number, dtype=dtype: measure(dtype, number) for dtype in _DTYPES}
    timings = alternate(contenders, repeats=args.repeats, device=args.device, label="head_dtypes")  # type: ignore[arg-type]
    clock = main_clock(args.device)
    rows: list[dict[str, Cell]] = []
    for dtype in _DTYPES:
        seconds = median(timings[dtype], clock)
        operations = 4 * shape[0] * shape[1] * bench.num_targets
        rows.append(
            {
                "head": dtype,
                "targets": bench.num_targets,
                "us per target": Spread.of([1e6 * t.seconds(clock) / bench.num_targets for t in timings[dtype]]),
                "time ratio": ratio(timings["float32"], timings[dtype], clock),
                "share of peak": operations / seconds / peak_flops(torch.device(args.device), getattr(torch, dtype)),
                "extra peak GB": peaks[dtype] / 1e9,
                "log-prob error": bench.error(dtype),
            }
        )
    return Result(
        summary=f"{bench.num_targets:,} log-probs with gradient at a vocabulary of {shape[0]:,}, hidden size "
        f"{shape[1]:,}, on {args.device}.",
        rows=rows,
        notes=[
            "time ratio: of float32 by this one, round by round; above 1 is faster than float32",
            "share of peak: of the device in this dtype, from two products with the head",
            "log-prob error: largest difference in nats from float64, on "
            f"{min(_NUM_COMPARED, bench.num_targets)} targets",
        ],
    )


class HeadBench:
    """Hidden states and heads of both dtypes with the same numbers."""

    def __init__(self, shape: tuple[int, int], num_targets: int, device: str) -> None:
        """`shape` is [V, H] of the head."""
        vocab_size, hidden_size = shape
        generator = torch.Generator().manual_seed(0)
        weight = (torch.randn(shape, generator=generator) * 0.05).bfloat16().to(device)
        hidden = torch.randn(num_targets, hidden_size, generator=generator).bfloat16().to(device)
        self.num_targets = num_targets
        self._heads = {dtype: Head(weight.to(getattr(torch, dtype)), None) for dtype in _DTYPES}
        self._hidden = {dtype: hidden.to(getattr(torch, dtype)) for dtype in _DTYPES}
        self._rows = _targets(vocab_size, num_targets, torch.device(device))

    def run(self, dtype: str) -> Tensor:
        hidden = self._hidden[dtype].detach().requires_grad_()
        logprobs = target_logprobs(hidden, self._heads[dtype], self._rows)[0]
        logprobs.sum().backward()
        return logprobs.detach()

    def error(self, dtype: str) -> float:
        few = slice(_NUM_COMPARED)
        logits = self._hidden["float32"][few].double() @ self._heads["float32"].weight.double().T
        expected = logits.log_softmax(-1).gather(1, self._rows.token_ids[few, None])[:, 0]
        return float((self.run(dtype)[few].double() - expected).abs().max())


def _targets(vocab_size: int, count: int, device: torch.device) -> TargetRows:
    """One target for each of `count` hidden states, as the trainer lays them out."""
    path = check_sample(plain_sample([(7919 * i) % vocab_size for i in range(count + 1)], "row"), vocab_size=vocab_size)
    assert path is not None
    return group_by_row(build_tree([path]).targets, device)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["head_dtypes", *sys.argv[1:]])
