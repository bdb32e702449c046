"""What the token file of a step costs: bytes per trained token, and time beside the rest of the step.

Whole training steps of the trainer (check, plan, updates, token file, checkpoint) with and without the file take turns.

    short answers    rollouts of 5 turns with 2 tokens each, as in the tic-tac-toe demo: most bytes per token
    prompt groups    groups of 8 completions of 64 tokens after a prompt of 512
    agents           rollouts of 12 turns of 32 tokens, one sample per rollout

    python -m benchmarks token_file --json token_file.json
    python -m benchmarks token_file --quick
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

from art.config import TrainConfig, TrainerConfig
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.storage.step_files import NAME
from art.trainer.step import update
from art.trainer.trainer import Trainer
from benchmarks.models import LORA, QUICK_MODELS, choose_dtype, model_files
from benchmarks.report import Cell, Result, Spread
from benchmarks.timing import Timing, alternate, main_clock, median
from benchmarks.workloads import AgentShape, Samples, agent, group

MODELS = {"cpu": ["1.2 M", "5 M"], "cuda": ["4 B"]}
_NUM_ROLLOUTS = 32
_PLAIN, _RECORDED = "without", "with the file"


def add_options(group: argparse._ArgumentGroup) -> None:
    del group


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    rows = []
    for name in args.models or (QUICK_MODELS if args.quick else MODELS[args.device]):
        with model_files(name, args.device) as files, TemporaryDirectory() as folder:
            config = TrainerConfig(device=args.device, dtype=choose_dtype(args), num_threads=1)
            bench = _Bench(Trainer(str(files.base), config), Path(folder))
            for workload, samples in _workloads(files.vocab_size, quick=args.quick).items():
                rows.append({"model": name, "workload": workload, **bench.compare(samples, args)})
    return Result(
        summary=f"Training steps on {args.device} with and without the token file, LoRA rank {LORA.rank}.",
        rows=rows,
        notes=[
            "bytes per token: size of the file by trained tokens",
            "file: wall time to collect the values, write the file and sync it, by the wall time of the step",
            "reasons: wall time to find out what became of each token, which every step does, by that of the step",
            "paired: time of a step with the file by that of one without, round by round",
        ],
        clock="wall" if args.device == "cuda" else "CPU",
    )


@dataclass(slots=True)
class _Bench:
    trainer: Trainer
    folder: Path
    file_shares: list[float] = field(default_factory=list)
    reason_shares: list[float] = field(default_factory=list)
    size: int = 0

    def compare(self, samples: Samples, args: argparse.Namespace) -> dict[str, Cell]:
        self.file_shares, self.reason_shares = [], []
        start = self.folder / "0000"
        if not start.exists():
            self.trainer.init_checkpoint(start, LORA)
        contenders = {
            _PLAIN: lambda number: self.step(samples, number, records=False),
            _RECORDED: lambda number: self.step(samples, number, records=True),
        }
        timings = alternate(contenders, repeats=args.repeats, device=args.device, label="token file")
        clock = main_clock(args.device)
        num_tokens = sum(sum(sample.loss_mask) for sample in samples)
        return {
            "trained tokens": num_tokens,
            "bytes per token": round(self.size / num_tokens, 2),
            "step s": median(timings[_PLAIN], clock),
            "file": Spread.of(self.file_shares[1:]),
            "reasons": Spread.of(self.reason_shares[1:]),
            "paired": _paired(timings[_RECORDED], timings[_PLAIN], clock),
        }

    def step(self, samples: Samples, number: int, *, records: bool) -> None:
        target, steps = self.folder / "0001", self.folder / "steps"
        call = Train(
            samples=samples,
            config=TrainConfig(mismatch=None, learning_rate=1e-5),
            from_checkpoint=self.folder / "0000",
            to_checkpoint=target,
            job_id=f"job-{number:06d}",
            record_to=steps if records else None,
        )
        started = time.perf_counter()
        with _timed_reasons() as spent:
            metrics = self.trainer.train(call).metrics
        total = time.perf_counter() - started
        self.reason_shares.append(sum(spent) / total)
        if records:
            self.file_shares.append(metrics["time/step_token_file_s"] / total)
            self.size = (steps / NAME).stat().st_size
        shutil.rmtree(target)
        shutil.rmtree(steps, ignore_errors=True)


def _paired(slower: Sequence[Timing], faster: Sequence[Timing], clock: str) -> Spread:
    return Spread.of([getattr(a, clock) / getattr(b, clock) for a, b in zip(slower, faster, strict=True)])


@contextmanager
def _timed_reasons() -> Iterator[list[float]]:
    """Measure the seconds that the trainer spends in `find_reasons`."""
    seconds: list[float] = []
    real = update.find_reasons

    def timed(*args: object) -> object:
        started = time.perf_counter()
        try:
            return real(*args)  # type: ignore[arg-type]
        finally:
            seconds.append(time.perf_counter() - started)

    with mock.patch.object(update, "find_reasons", timed):
        yield seconds


def _workloads(vocab_size: int, *, quick: bool) -> dict[str, Samples]:
    rng = random.Random(0)
    count = 4 if quick else _NUM_ROLLOUTS
    short = AgentShape(prompt=25, observation=20, answer=2, kept=2)
    long = AgentShape(prompt=200, observation=16, answer=32, kept=32)
    prompts = [group(rng, vocab_size, 512, 8, 64) for _ in range(count // 8 or 1)]
    return {
        "short answers": [_whole(agent(rng, vocab_size, short, 5), f"r{number}") for number in range(count)],
        "prompt groups": [
            replace(sample, sample_id=f"g{number}.{sample.sample_id}", rollout_id=f"g{number}.{sample.sample_id}")
            for number, samples in enumerate(prompts)
            for sample in samples
        ],
        "agents": [_whole(agent(rng, vocab_size, long, 12), f"r{number}") for number in range(count // 4 or 1)],
    }


def _whole(turns: Samples, name: str) -> TrainingSample:
    """One sample of all turns of a rollout, named as the server names them."""
    mask = [False] * len(turns[-1].token_ids)
    advantages = [0.0] * len(mask)
    for turn in turns:
        for place, learnt in enumerate(turn.loss_mask):
            if learnt:
                mask[place], advantages[place] = True, turn.advantages[place]
    label = f"groups[{name[1:]}].trajectories[{name[1:]}]"
    return replace(
        turns[-1],
        sample_id=f"{label}.paths[0]",
        rollout_id=label,
        loss_mask=mask,
        advantages=advantages,
        sampling_logprobs=[0.0] * len(mask),
    )


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["token_file", *sys.argv[1:]]))
