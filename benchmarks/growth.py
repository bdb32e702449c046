"""Cost of an update as the work grows: more trajectories of a group, more turns of an agent.

A group of 1 to 64 completions behind one prompt, and an agent of 1 to 32 turns that extends its history (a sample for
each of its requests), each over the prefix tree, packed without sharing (block-diagonal), and padded in transformers
with peft. See `train_step` for what these three do.

    python -m benchmarks growth --quick
    python -m benchmarks growth --models 30M --json growth.json
    python -m benchmarks growth --device cuda
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from benchmarks.gradients import BothModels, Gradient, open_models, with_sampling_logprobs
from benchmarks.models import LORA, QUICK_MODELS, choose_dtype
from benchmarks.report import Cell, Result, middle
from benchmarks.timing import alternate, main_clock, median, ratio
from benchmarks.workloads import AgentShape, Samples, agent, group, without_sharing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = {"cpu": ["5 M"], "cuda": ["4 B"]}

_TRAJECTORIES, _TURNS = "trajectories", "turns"
_NUMBERS = {_TRAJECTORIES: (1, 2, 4, 8, 16, 32, 64), _TURNS: (1, 2, 4, 8, 16, 32)}
_QUICK_NUMBERS = {_TRAJECTORIES: (1, 4), _TURNS: (1, 4)}
_GROUP = {"quick": (64, 16), "cpu": (512, 64), "cuda": (4096, 512)}
"""Tokens of the prompt and of each completion."""
_AGENT = {
    "quick": AgentShape(prompt=32, observation=4, answer=8, kept=8),
    "cpu": AgentShape(prompt=200, observation=16, answer=32, kept=32),
    "cuda": AgentShape(prompt=2048, observation=128, answer=128, kept=128),
}

_TREE = "tree"
_PEERS = ("block-diagonal", "padded")


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    rows: list[dict[str, Cell]] = []
    for name in args.models or (QUICK_MODELS if args.quick else MODELS[args.device]):
        with open_models(name, args) as both:
            for kind, number, samples in _workloads(both.files.vocab_size, args):
                rows.append(_compare(both, kind, number, with_sampling_logprobs(both.peft, samples), args))
    (prompt, answer), turn = _GROUP[_size(args)], _AGENT[_size(args)]
    return Result(
        summary=f"Loss and gradient of one update in {choose_dtype(args)} on {args.device}, LoRA rank {LORA.rank}.",
        rows=rows,
        notes=[
            f"trajectories: completions of {answer} tokens behind one prompt of {prompt}",
            f"turns: of {turn.observation} tokens of observation and {turn.answer} of answer, behind {turn.prompt}",
            "tokens ratio: computed tokens by those of the tree, the limit of what sharing alone can save",
            "time ratio: by the time of the tree, round by round, in CPU time (wall time on a GPU)",
        ],
    )


def _size(args: argparse.Namespace) -> str:
    return "quick" if args.quick else str(args.device)


def _workloads(vocab_size: int, args: argparse.Namespace) -> Iterator[tuple[str, int, Samples]]:
    """(what grows, how many there are, samples)"""
    numbers = _QUICK_NUMBERS if args.quick else _NUMBERS
    prompt, answer = _GROUP[_size(args)]
    for count in numbers[_TRAJECTORIES]:
        yield _TRAJECTORIES, count, group(random.Random(0), vocab_size, prompt, count, answer)
    for num_turns in numbers[_TURNS]:
        yield _TURNS, num_turns, agent(random.Random(0), vocab_size, _AGENT[_size(args)], num_turns)


def _compare(both: BothModels, kind: str, number: int, samples: Samples, args: argparse.Namespace) -> dict[str, Cell]:
    unmerged = without_sharing(samples, both.files.vocab_size)
    num_tokens: dict[str, int] = {}

    def contender(name: str, gradient: Callable[[], Gradient]) -> Callable[[int], None]:
        def call(_: int) -> None:
            num_tokens[name] = gradient().num_tokens

        return call

    contenders = {
        _TREE: contender(_TREE, lambda: both.tree_gradient(samples)),
        "block-diagonal": contender("block-diagonal", lambda: both.tree_gradient(unmerged)),
        "padded": contender("padded", lambda: both.plain_gradient(samples, both.rows)),
    }
    label = f"{both.files.name}, {number} {kind}"
    timings = alternate(contenders, repeats=args.repeats, device=args.device, label=label)
    clock = main_clock(args.device)
    seconds = {way: median(timings[way], clock) for way in contenders}
    row: dict[str, Cell] = {"model": both.files.name, "grows": kind, "number": number}
    row |= {"tree tokens": num_tokens[_TREE], "tree s": seconds[_TREE], "tree s per one": seconds[_TREE] / number}
    for way in _PEERS:
        row |= {
            f"{way} s": seconds[way],
            f"{way} tokens ratio": num_tokens[way] / num_tokens[_TREE],
            f"{way} time ratio": ratio(timings[way], timings[_TREE], clock),
        }
    return row


def draw(result: Result) -> Figure:
    """Time against number, both logarithmic, for each model and each thing that grows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    names = list(dict.fromkeys(str(row["model"]) for row in result.rows))
    figure = Figure(figsize=(11, 4.2 * len(names)), layout="constrained")
    for name, line in zip(names, figure.subplots(len(names), 2, squeeze=False), strict=True):
        for axes, kind in zip(line, (_TRAJECTORIES, _TURNS), strict=True):
            rows = [row for row in result.rows if row["model"] == name and row["grows"] == kind]
            numbers = [middle(row["number"]) for row in rows]
            for way in (*_PEERS, _TREE):
                axes.plot(numbers, [middle(row[f"{way} s"]) for row in rows], marker="o", markersize=4, label=way)
            for row in rows:
                text = f"{middle(row['padded time ratio']):.1f}x"
                place = (middle(row["number"]), middle(row["tree s"]))
                axes.annotate(text, place, (0, -14), textcoords="offset points", ha="center", fontsize=8)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.margins(y=0.12)
            axes.set_xlabel(f"{kind} (below the tree's curve: time of padded rows by that of the tree)", fontsize=9)
            axes.set_ylabel("seconds")
            axes.set_title(f"{name} parameters, more {kind}")
            axes.grid(color="0.9")
            axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["growth", *sys.argv[1:]])
