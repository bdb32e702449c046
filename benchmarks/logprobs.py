"""Peak memory and time of log-probs at a large vocabulary, with their gradient.

From hidden states [N, 1024] and a frozen head of 151,936 rows to the log-prob of one target each, and back:

    trainer    `target_logprobs`: chunks whose gradient is taken in the forward pass; also gives the entropy
    TRL        `selective_log_softmax` on all logits, as TRL computes them
    chunks     chunks of 256 rows whose logits are computed again in the backward pass (activation checkpointing)
    naive      `log_softmax` of all logits, then `gather`

Each measurement runs in a fresh process, so that no memory left over from another hides a part of its peak.

    python -m benchmarks logprobs --quick
    python -m benchmarks logprobs --targets 2048
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from art.protocol.samples import TrainingSample
from art.trainer.logprobs import Head, TargetRows, group_by_row, target_logprobs
from art.trainer.tree import build_tree, check_sample
from benchmarks.memory import extra_peak_bytes
from benchmarks.report import Cell, Result, Spread, error_bar, middle
from benchmarks.timing import Timing, main_clock, measure, median, progress, ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIDDEN = 1024
_VOCAB, _QUICK_VOCAB = 151_936, 8192
_QUICK_TARGETS = 256
_CHUNK = 256
_TRL_BATCH = 8
"""Sequences that TRL's logits are of: it goes through them one by one."""
_OURS, _TRL, _NAIVE = "trainer", "TRL", "naive"


@dataclass(frozen=True, slots=True)
class Work:
    vocab_size: int
    num_targets: int
    device: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class Measurement:
    timing: Timing
    extra_bytes: int
    """Peak beyond hidden states and head."""
    logprobs: npt.NDArray[np.float32]  # [N]
    gradient: npt.NDArray[np.float32]  # [N, H]


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--targets", type=int, help="log-probs to compute (default: 4096)")


def run(args: argparse.Namespace) -> Result:
    num_targets = args.targets or (_QUICK_TARGETS if args.quick else 4096)
    work = Work(_QUICK_VOCAB if args.quick else _VOCAB, num_targets, args.device, num_threads=1)
    ways = [way for way in _WAYS if way != _TRL or find_spec("trl")]
    found: dict[str, list[Measurement]] = {way: [] for way in ways}
    with progress("logprobs", total=args.repeats * len(ways)) as bar:
        for number in range(args.repeats):
            for way in ways if number % 2 else ways[::-1]:
                found[way].append(_in_fresh_process(way, work))
                bar.update()
    return Result(
        summary=f"{num_targets:,} log-probs at a vocabulary of {work.vocab_size:,}, hidden size {HIDDEN}, float32 on "
        f"{args.device}, with the gradient of the hidden states.",
        rows=[_row(way, found, work) for way in found],
        notes=[
            "extra peak: resident memory (allocated memory on a GPU) beyond hidden states and head",
            "logits: how many times the memory of all logits in float32 that is",
            "time ratio: of naive by this one, round by round; above 1 is faster than naive",
            "errors: largest difference of a log-prob from naive in nats, and |g - g'| / |g'| of the gradient",
            *([] if _TRL in found else ["TRL is not installed here and was left out"]),
        ],
    )


def _in_fresh_process(way: str, work: Work) -> Measurement:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_way, way, work).result()


def measure_way(way: str, work: Work) -> Measurement:
    """Time and peak of one forward and backward pass, after a small one that sets up whatever is set up once."""
    torch.set_num_threads(work.num_threads)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(work.vocab_size, HIDDEN, generator=generator) * 0.05).to(work.device)
    hidden = torch.randn(work.num_targets, HIDDEN, generator=generator).to(work.device).requires_grad_()
    upstream = torch.randn(work.num_targets, generator=generator).to(work.device)
    _gradient(way, weight[:512], hidden.detach()[:8].requires_grad_(), upstream[:8])
    hidden.grad = None
    result: dict[str, Tensor] = {}
    timings = []

    def work_once() -> None:
        result["logprobs"] = _gradient(way, weight, hidden, upstream)

    extra = extra_peak_bytes(lambda: timings.append(measure(work_once, work.device)), work.device)
    assert hidden.grad is not None
    return Measurement(timings[0], extra, result["logprobs"].cpu().numpy(), hidden.grad.cpu().numpy())


def _gradient(way: str, weight: Tensor, hidden: Tensor, upstream: Tensor) -> Tensor:
    """Log-probs [N] of `_targets`; leaves the gradient of their product with `upstream` in `hidden.grad`."""
    rows = _targets(len(weight), len(hidden), hidden.device)
    logprobs = _WAYS[way](hidden, weight, rows)
    (logprobs @ upstream).backward()
    return logprobs.detach()


def _targets(vocab_size: int, count: int, device: torch.device) -> TargetRows:
    """One target for each of `count` hidden states, as the trainer lays them out."""
    rng = random.Random(0)
    sample = TrainingSample(
        sample_id="0",
        rollout_id="0",
        token_ids=[rng.randrange(vocab_size) for _ in range(count + 1)],
        loss_mask=[False] + [True] * count,
        sampling_logprobs=[0.0] * (count + 1),
        advantages=[0.0] * (count + 1),
    )
    path = check_sample(sample, vocab_size=vocab_size)
    assert path is not None
    return group_by_row(build_tree([path]).targets, device)


def _ours(hidden: Tensor, weight: Tensor, rows: TargetRows) -> Tensor:
    return target_logprobs(hidden, Head(weight, None), rows)[0]


def _selective(hidden: Tensor, weight: Tensor, rows: TargetRows) -> Tensor:
    from trl.trainer.utils import selective_log_softmax

    batch = math.gcd(len(hidden), _TRL_BATCH)
    logits = (hidden @ weight.T).unflatten(0, (batch, -1))
    logprobs: Tensor = selective_log_softmax(logits, rows.token_ids.unflatten(0, (batch, -1)))
    return logprobs.flatten()


def _checkpointed(hidden: Tensor, weight: Tensor, rows: TargetRows) -> Tensor:
    def chunk(part: Tensor, token_ids: Tensor) -> Tensor:
        logits = part @ weight.T
        return logits.gather(1, token_ids[:, None])[:, 0] - logits.logsumexp(-1)

    pairs = zip(hidden.split(_CHUNK), rows.token_ids.split(_CHUNK), strict=True)
    return torch.cat([checkpoint(chunk, *pair, use_reentrant=False) for pair in pairs])


def _naive(hidden: Tensor, weight: Tensor, rows: TargetRows) -> Tensor:
    return (hidden @ weight.T).log_softmax(-1).gather(1, rows.token_ids[:, None])[:, 0]


_WAYS: dict[str, Callable[[Tensor, Tensor, TargetRows], Tensor]] = {
    _OURS: _ours,
    _TRL: _selective,
    "chunks": _checkpointed,
    _NAIVE: _naive,
}


def _row(way: str, found: dict[str, list[Measurement]], work: Work) -> dict[str, Cell]:
    timings = {name: [one.timing for one in measurements] for name, measurements in found.items()}
    peak = Spread.of([one.extra_bytes / 1e9 for one in found[way]])
    one, naive = found[way][0], found[_NAIVE][0]
    return {
        "way": way,
        "extra peak GB": peak,
        "logits": peak.median / (4e-9 * work.num_targets * work.vocab_size),
        "seconds": median(timings[way], main_clock(work.device)),
        "time ratio, CPU": 1 if way == _NAIVE else ratio(timings[_NAIVE], timings[way], "cpu_s"),
        "time ratio, wall": 1 if way == _NAIVE else ratio(timings[_NAIVE], timings[way], "wall_s"),
        "log-prob error": float(np.abs(one.logprobs - naive.logprobs).max()),
        "gradient error": float(np.linalg.norm(one.gradient - naive.gradient) / np.linalg.norm(naive.gradient)),
    }


def draw(result: Result) -> Figure:
    """Extra memory and time of each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    memory, time = figure.subplots(1, 2)
    ways = [str(row["way"]) for row in result.rows]
    colors = ["tab:green" if way == _OURS else "tab:grey" for way in ways]
    peaks = [row["extra peak GB"] for row in result.rows]
    bars = memory.bar(ways, [middle(peak) for peak in peaks], color=colors, yerr=error_bar(peaks), capsize=3)
    memory.bar_label(bars, fmt="%.3g", padding=3)
    memory.set_ylabel("extra peak memory, GB")
    bars = time.bar(ways, [middle(row["seconds"]) for row in result.rows], color=colors)
    time.bar_label(bars, fmt="%.3g", padding=3)
    time.set_ylabel("seconds")
    for axes in (memory, time):
        axes.margins(y=0.12)
    return figure


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["logprobs", *sys.argv[1:]])
