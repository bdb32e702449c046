"""Loss and gradient over the prefix tree against the same samples packed, padded and one by one.

    tree               the trainer's own way: check, pack, lay out, forward, backward
    block-diagonal     the trainer with nothing merged: samples in one row, attention within each (as packing does)
    padded             transformers with peft: sorted by length, several rows per forward pass, padding masked
    one by one         the same with 1 row
    plain row          the trainer on one sequence with as many tokens and targets as the tree: the arithmetic limit
    plain row in peft  transformers with peft on that sequence

All but the plain rows compute the gradient of the same loss on the same adapter. Block-diagonal changes the first token
of each sample, so that nothing can merge. Padded and one by one compute the head only where something is learnt, as a
good plain trainer does. An agent has one sample for each of its requests, as recorded.

    python -m benchmarks train_step --quick               a tiny model and small batches, seconds
    python -m benchmarks train_step --models 100M --workloads prompt      some of the workloads
    python -m benchmarks train_step --device cuda         a 4B-shaped model in bfloat16, trees of 16k tokens
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from benchmarks.gradients import BothModels, Gradient, matmul_rate, open_models, with_sampling_logprobs
from benchmarks.memory import extra_peak_bytes
from benchmarks.models import LORA, QUICK_MODELS, backbone_weights, choose_dtype
from benchmarks.report import Cell, Result, error_bar, middle
from benchmarks.timing import Timing, alternate, main_clock, median, ratio
from benchmarks.workloads import SIZES, Samples, group, learnt, make_workloads, plain_row, without_sharing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = {"cpu": ["5 M", "100 M"], "cuda": ["4 B"]}

_TREE = "tree"
_PEERS = ("block-diagonal", "padded", "one by one")
_PLAIN_ROW, _PLAIN_ROW_PEFT = "plain row", "plain row in peft"


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workloads", default="", metavar="WORD", help="only those with this word in their name")


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    sizes = SIZES["quick" if args.quick else args.device]
    rows: list[dict[str, Cell]] = []
    for name in args.models or (QUICK_MODELS if args.quick else MODELS[args.device]):
        with open_models(name, args) as both:
            bench = _Bench(both, args)
            for workload, samples in make_workloads(both.files.vocab_size, sizes).items():
                if args.workloads in workload:
                    rows += bench.compare(workload, samples)
    return Result(
        summary=f"Loss and gradient of one update in {choose_dtype(args)} on {args.device}, LoRA rank {LORA.rank}.",
        rows=rows,
        notes=[
            "time: by that of the tree, round by round; for a plain row it is the share of the arithmetic limit that "
            "the tree reaches",
            "tokens ratio: computed tokens by those of the tree, the limit of what sharing alone can save",
            "effective tokens/s: tokens of the samples, shared ones counted each time, per second",
            "utilisation: arithmetic of forward pass and input gradients per second, by that of a plain matrix product "
            "measured in the same run",
            "gradient error: |g - g'| / |g'| where g' is the gradient one by one",
        ],
        clock="wall" if args.device == "cuda" else "CPU",
    )


class _Bench:
    """One model in both implementations."""

    def __init__(self, both: BothModels, args: argparse.Namespace) -> None:
        self._both, self._args = both, args
        # What is set up once, on first use, belongs to no workload.
        warm_up = group(random.Random(1), both.files.vocab_size, 32, 4, 16)
        both.tree_gradient(warm_up)
        both.plain_gradient(warm_up, both.rows)

    def compare(self, workload: str, samples: Samples) -> list[dict[str, Cell]]:
        samples = with_sampling_logprobs(self._both.peft, samples)
        contenders = self._contenders(samples)
        last: dict[str, Gradient] = {}
        peaks: dict[str, int] = {}

        def contender(name: str) -> Callable[[int], None]:
            def call() -> None:
                last[name] = contenders[name]()

            def call_round(number: int) -> None:
                if number > 0:
                    call()
                else:  # the round that is not counted, since measuring memory takes time
                    peaks[name] = extra_peak_bytes(call, self._args.device)

            return call_round

        timings = alternate(
            {name: contender(name) for name in contenders},
            repeats=self._args.repeats,
            device=self._args.device,
            label=f"{self._both.files.name}, {workload}",
        )
        unshared = sum(len(sample.token_ids) for sample in samples)
        clock = main_clock(self._args.device)
        return [
            {"model": self._both.files.name, "workload": workload}
            | self._row(way, timings, last, samples)
            | {
                "effective tokens/s": round(unshared / median(timings[way], clock)) if way in (_TREE, *_PEERS) else "",
                "extra peak MB": round(peaks[way] / 1e6),
                "gradient error": _error(last[way], last["one by one"]) if way in (_TREE, "padded") else "",
            }
            for way in contenders
        ]

    def _contenders(self, samples: Samples) -> dict[str, Callable[[], Gradient]]:
        both = self._both
        unmerged = without_sharing(samples, both.files.vocab_size)
        num_tokens = both.tree_gradient(samples).num_tokens
        row = [plain_row(num_tokens, len(list(learnt(samples, "loss_mask"))), both.files.vocab_size)]
        row = with_sampling_logprobs(both.peft, row)
        return {
            _TREE: lambda: both.tree_gradient(samples),
            "block-diagonal": lambda: both.tree_gradient(unmerged),
            "padded": lambda: both.plain_gradient(samples, both.rows),
            "one by one": lambda: both.plain_gradient(samples, 1),
            _PLAIN_ROW: lambda: both.tree_gradient(row),
            _PLAIN_ROW_PEFT: lambda: both.plain_gradient(row, 1),
        }

    def _row(
        self, way: str, timings: dict[str, list[Timing]], last: dict[str, Gradient], samples: Samples
    ) -> dict[str, Cell]:
        seconds = median(timings[way], main_clock(self._args.device))
        num_tokens = last[way].num_tokens
        num_targets = len(list(learnt(samples, "loss_mask")))
        vocab_size, hidden_size = self._both.policy.base.head.weight.shape
        # Two operations per weight in the forward pass, and two more for the input gradient.
        weights = backbone_weights(self._both.files.name)
        operations = 4 * (weights * num_tokens + vocab_size * hidden_size * num_targets)
        rate = matmul_rate(self._args.device, choose_dtype(self._args))
        return {
            "way": way,
            "tokens": num_tokens,
            "tokens ratio": num_tokens / last[_TREE].num_tokens,
            "seconds": seconds,
            "time, CPU": 1 if way == _TREE else ratio(timings[way], timings[_TREE], "cpu_s"),
            "time, wall": 1 if way == _TREE else ratio(timings[way], timings[_TREE], "wall_s"),
            "tokens/s": round(num_tokens / seconds),
            "utilisation": operations / seconds / rate,
        }


def _error(gradient: Gradient, expected: Gradient) -> float:
    return float((gradient.values - expected.values).norm() / expected.values.norm())


def draw(result: Result) -> Figure:
    """Per model, how many times as long as the tree the others take, beside the ratio of tokens."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(str(row["model"]) for row in result.rows))
    figure = Figure(figsize=(11, 3.6 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
        cells = {(row["workload"], row["way"]): row for row in result.rows if row["model"] == name}
        workloads = list(dict.fromkeys(str(workload) for workload, _ in cells))
        for offset, way in zip((-0.27, 0.0, 0.27), _PEERS, strict=True):
            places = [i + offset for i in range(len(workloads))]
            rows = [cells[workload, way] for workload in workloads]
            times = [row[f"time, {result.clock}"] for row in rows]
            axes.bar(places, [middle(time) for time in times], 0.25, yerr=error_bar(times), capsize=3, label=way)
            limits = [middle(row["tokens ratio"]) for row in rows]
            limit = axes.hlines(limits, [p - 0.12 for p in places], [p + 0.12 for p in places], colors="black")
        limit.set_label("ratio of tokens")
        axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="dotted")
        shares = [middle(cells[workload, _PLAIN_ROW][f"time, {result.clock}"]) for workload in workloads]
        labels = [f"{w}\n{share:.0%} of the arithmetic limit" for w, share in zip(workloads, shares, strict=True)]
        axes.set_xticks(range(len(workloads)), labels, fontsize=8)
        axes.set_ylabel("time by that of the tree")
        axes.set_title(f"train step, {name} parameters")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
        axes.legend(fontsize=8, ncols=4, loc="upper left")
    return figure


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["train_step", *sys.argv[1:]])
