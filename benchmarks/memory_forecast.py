"""Forecast of the trainer's memory (`art doctor`) against the peak of a process that makes two real steps.

Each point is a model with random weights, some settings and one micro-batch of random sequences. A fresh process loads
the model, trains two steps of supervised fine-tuning on it, with their checkpoints, and reports the most memory that it
ever had resident. Nothing is subtracted: Python, torch and what the C library keeps are in it, and in the forecast.

    python -m benchmarks memory_forecast --quick
    python -m benchmarks memory_forecast --json out.json
"""

from __future__ import annotations

import argparse
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from art.config import LoraConfig, TrainerConfig
from art.kernels.process import peak_rss_bytes
from art.memory import TrainerSetup, read_shape, total
from benchmarks.report import Cell, Result

GIB = 2**30
_NUM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One model, the settings of its training, and a micro-batch."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    vocab: int = 8192
    num_sequences: int = 1
    length: int = 1024
    """Tokens of each sequence."""
    dtype: str = "float32"
    full: bool = False
    """Train all weights instead of a LoRA of rank 16."""
    checkpointing: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    @property
    def lora(self) -> LoraConfig | None:
        return None if self.full else LoraConfig()

    @property
    def trainer(self) -> TrainerConfig:
        return TrainerConfig.model_validate(
            {
                "device": "cpu",
                "dtype": self.dtype,
                "max_tokens": max(64, self.num_tokens),
                "gradient_checkpointing": self.checkpointing,
                "num_threads": 1,
            }
        )

    def __str__(self) -> str:
        kind = "all weights" if self.full else "LoRA 16"
        saving = ", checkpointing" if self.checkpointing else ""
        return f"{kind}, {self.dtype}{saving}"


QUICK = Point(layers=2, hidden=64, mlp=128, heads=2, vocab=512, length=256)
POINTS = (
    Point(layers=6, hidden=512, mlp=1536, heads=8),
    Point(layers=6, hidden=512, mlp=1536, heads=8, checkpointing=True),
    Point(layers=6, hidden=512, mlp=1536, heads=8, full=True),
    Point(layers=6, hidden=512, mlp=1536, heads=8, dtype="bfloat16"),
    Point(layers=4, hidden=256, mlp=768, heads=4, vocab=2048, length=8192),
    Point(layers=4, hidden=256, mlp=768, heads=4, vocab=2048, length=8192, dtype="bfloat16", checkpointing=True),
    Point(layers=12, hidden=768, mlp=2048, heads=12, vocab=32_768, num_sequences=4, length=512),
    Point(layers=4, hidden=1024, mlp=3072, heads=16, vocab=8192, length=256, full=True, dtype="bfloat16"),
    Point(layers=2, hidden=2560, mlp=9728, heads=32, vocab=4096, length=1024),
)  # fmt: skip


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--points", metavar="0,3", help="numbers of the points to measure (default: all)")


def run(args: argparse.Namespace) -> Result:
    chosen = POINTS if args.points is None else [POINTS[int(number)] for number in args.points.split(",")]
    rows = []
    for point in [QUICK] if args.quick else chosen:
        setup, peak_bytes = compare(point)
        rows.append(_row(point, setup, peak_bytes))
        print(rows[-1], file=sys.stderr, flush=True)
    return Result(
        summary=f"Peak resident memory of a trainer process that makes {_NUM_STEPS} steps on a CPU, and its forecast.",
        rows=rows,
        notes=[
            "error: (forecast - measured) / measured; below 0 the forecast is too low",
            "fixed: process, weights, copies of them, gradients, moments; pass: activations and workspaces",
        ],
    )


def compare(point: Point) -> tuple[TrainerSetup, int]:
    """Make the model of a point; return what its forecast is made from, and the measured peak in bytes."""
    with TemporaryDirectory() as directory:
        folder = Path(directory) / "model"
        _make_model(point, folder)
        shape = read_shape(str(folder))
        assert shape is not None
        setup = TrainerSetup(
            shape=shape,
            config=point.trainer,
            lora=point.lora,
            device="cpu",
            checkpointing="full" if point.checkpointing else "none",
        )
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peak_bytes = pool.submit(_train, point, folder).result()
        return setup, peak_bytes


def _make_model(point: Point, folder: Path) -> None:
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=point.vocab,
        hidden_size=point.hidden,
        intermediate_size=point.mlp,
        num_hidden_layers=point.layers,
        num_attention_heads=point.heads,
        num_key_value_heads=max(1, point.heads // 4),
        head_dim=64,
        max_position_embeddings=2 * point.length,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).to(getattr(torch, point.dtype)).save_pretrained(folder)


def _train(point: Point, folder: Path) -> int:
    """Train, and return the peak of this process in bytes."""
    from art.config import TrainSFTConfig
    from art.protocol.calls import TrainSft
    from art.protocol.samples import TrainingSample
    from art.trainer.trainer import Trainer

    rng = random.Random(0)
    samples = []
    for number in range(point.num_sequences):
        zeros = [0.0] * point.length
        samples.append(
            TrainingSample(
                sample_id=str(number),
                rollout_id=str(number),
                token_ids=[rng.randrange(point.vocab) for _ in range(point.length)],
                loss_mask=[False] + [True] * (point.length - 1),
                sampling_logprobs=zeros,
                advantages=zeros,
                component="sft",
            )
        )
    trainer = Trainer(str(folder), point.trainer)
    if point.num_tokens > 4096:  # a CPU trainer cuts micro-batches at this; one longer sequence has its own
        assert point.num_sequences == 1
    checkpoints = [folder.parent / "checkpoints" / f"{step:04d}" for step in range(_NUM_STEPS + 1)]
    trainer.init_checkpoint(checkpoints[0], point.lora)
    config = TrainSFTConfig(learning_rate=1e-4, batch_size=point.num_sequences)
    for step in range(_NUM_STEPS):
        arguments: dict[str, Any] = {"from_checkpoint": checkpoints[step], "to_checkpoint": checkpoints[step + 1]}
        trainer.train(TrainSft(samples=samples, config=config, job_id=str(step), **arguments))
    return peak_rss_bytes()


def _row(point: Point, setup: TrainerSetup, peak_bytes: int) -> dict[str, Cell]:
    fixed, peak = total(setup.between_steps()), total(setup.at_peak(point.num_tokens))
    return {
        "trained": str(point),
        "layers": point.layers,
        "hidden / MLP": f"{point.hidden} / {point.mlp}",
        "vocabulary": point.vocab,
        "tokens": f"{point.num_sequences} x {point.length:,}",
        "fixed GiB": fixed / GIB,
        "pass GiB": (peak - fixed) / GIB,
        "forecast GiB": peak / GIB,
        "measured GiB": peak_bytes / GIB,
        "error": f"{100 * (peak / peak_bytes - 1):+.0f} %",
    }


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["memory_forecast", *sys.argv[1:]])
