"""One whole GRPO step (generate, train) of ART against TRL's `GRPOTrainer`.

Both sample 8 completions of 64 tokens for each prompt and make one LoRA update from them, starting from the same model
directory, with the same batch, prompts, reward and threads. Ours is the embedded engine, the trainer, and the publish
between them with its handshake, in one process; TRL generates with transformers, as it does without vLLM. Each side has
a process of its own, and they take turns.

    python -m benchmarks grpo_step --quick
    python -m benchmarks grpo_step --models 30M --threads 1
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.grpo_loops import (
    COMPLETIONS,
    GENERATE,
    NEW_TOKENS,
    PUBLISH,
    SCORE,
    TOTAL,
    TRAIN,
    StepTimes,
    Work,
    Worker,
    run_ours,
    run_trl,
    write_tokenizer,
)
from benchmarks.models import LORA, QUICK_MODELS, choose_dtype, model_files
from benchmarks.report import Cell, Result, middle
from benchmarks.timing import Clock, Timing, median, progress, ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ["1.2 M", "5 M"]

_SIZES = ((4, 512), (8, 64))
"""(prompts in a step, tokens of each)."""
_QUICK_SIZES = ((1, 64),)
_OURS, _TRL, _TRL_TUNED = "ART", "TRL", "TRL tuned"
_PARTS = (GENERATE, SCORE, TRAIN, PUBLISH)


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side (default: all)")


def run(args: argparse.Namespace) -> Result:
    rows: list[dict[str, Cell]] = []
    for name in args.models or (QUICK_MODELS if args.quick else MODELS):
        with model_files(name, args.device) as files:
            write_tokenizer(files.base, files.vocab_size)
            for num_prompts, prompt_tokens in _QUICK_SIZES if args.quick else _SIZES:
                work = Work(
                    model=files.base,
                    device=args.device,
                    dtype=choose_dtype(args),
                    num_threads=args.threads,
                    num_prompts=num_prompts,
                    prompt_tokens=prompt_tokens,
                    vocab_size=files.vocab_size,
                    num_rounds=args.repeats + 1,
                )
                rows += _compare(name, work)
    return Result(
        summary=f"A step of {COMPLETIONS} completions of {NEW_TOKENS} tokens per prompt in {choose_dtype(args)} on "
        f"{args.device}, {args.threads} threads, LoRA rank {LORA.rank}.",
        rows=rows,
        notes=[
            "TRL: with its defaults; tuned: without gradient checkpointing, which saves memory that nobody needs here",
            "ratio: TRL's time by ours, round by round",
            "tokens ratio: tokens that TRL computes by those that ART does, sampling and training together, each once; "
            "what is above it is due to other savings, or to checkpointing",
            "train of ART: rewards to checkpoint on disk; publish: checkpoint to engine, with the handshake",
            "score of TRL: from completions to advantages, without generation",
            "parts are medians of wall time in seconds",
        ],
    )


def _compare(name: str, work: Work) -> list[dict[str, Cell]]:
    """One row for each side."""
    workers = {
        _OURS: Worker(run_ours, work),
        _TRL: Worker(run_trl, work),
        _TRL_TUNED: Worker(partial(run_trl, gradient_checkpointing=False), work),
    }
    try:
        times = _alternate(workers, work, f"{name}, {work.num_prompts} x {work.prompt_tokens}")
    finally:
        for worker in workers.values():
            worker.close()
    ours, theirs = computed_tokens(work)
    return [
        {
            "model": name,
            "prompts": f"{work.num_prompts} x {work.prompt_tokens} tokens",
            "side": side,
            "seconds": median(_part(times[side], TOTAL), "wall_s"),
            "CPU s": median(_part(times[side], TOTAL), "cpu_s"),
            "ratio, wall": 1 if side == _OURS else _ratio(times[side], times[_OURS], "wall_s"),
            "ratio, CPU": 1 if side == _OURS else _ratio(times[side], times[_OURS], "cpu_s"),
            "tokens ratio": 1 if side == _OURS else theirs / ours,
            **{part: _cell(times[side], part) for part in _PARTS},
        }
        for side in workers
    ]


def _alternate(workers: dict[str, Worker], work: Work, label: str) -> dict[str, list[StepTimes]]:
    """As `timing.alternate`, but in processes that measure themselves."""
    times: dict[str, list[StepTimes]] = {side: [] for side in workers}
    with progress(label, total=work.num_rounds * len(workers)) as bar:
        for number in range(work.num_rounds):
            for side in list(workers) if number % 2 else list(workers)[::-1]:
                step = workers[side].step(number)
                if number > 0:
                    times[side].append(step)
                bar.update()
    return times


def _part(steps: list[StepTimes], part: str) -> list[Timing]:
    return [step[part] for step in steps]


def _cell(steps: list[StepTimes], part: str) -> Cell:
    return median(_part(steps, part), "wall_s") if part in steps[0] else ""


def _ratio(theirs: list[StepTimes], ours: list[StepTimes], clock: Clock) -> Cell:
    return ratio(_part(theirs, TOTAL), _part(ours, TOTAL), clock)


def computed_tokens(work: Work) -> tuple[int, int]:
    """(ART, TRL): prompts, completions while sampling, and training. A last token is never computed."""
    sampled = COMPLETIONS * (NEW_TOKENS - 1)
    ours = work.num_prompts * 2 * (work.prompt_tokens + sampled)
    theirs = work.num_prompts * (2 * (COMPLETIONS * work.prompt_tokens + sampled) + COMPLETIONS)
    return ours, theirs


def draw(result: Result) -> Figure:
    """Per workload, the time of a step of each side, by part."""
    from matplotlib.figure import Figure

    works = list(dict.fromkeys((row["model"], row["prompts"]) for row in result.rows))
    figure = Figure(figsize=(2.6 + 2.4 * len(works), 4), layout="constrained")
    for axes, work in zip(figure.subplots(1, len(works), squeeze=False)[0], works, strict=True):
        rows = {row["side"]: row for row in result.rows if (row["model"], row["prompts"]) == work}
        bottoms = [0.0] * len(rows)
        for part in _PARTS:
            heights = [middle(row[part] or 0.0) for row in rows.values()]
            axes.bar(list(rows), heights, 0.6, bottom=bottoms, label=part)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        ratios = " and ".join(f"{middle(rows[side]['ratio, CPU']):.1f}x" for side in (_TRL, _TRL_TUNED))
        axes.set_title(f"{work[0]}, {work[1]}\n{ratios}", fontsize=10)
        axes.tick_params("x", labelsize=8)
        axes.set_ylim(0, 1.08 * max(bottoms))
    figure.axes[0].set_ylabel("wall seconds of a step")
    figure.axes[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["grpo_step", *sys.argv[1:]])
