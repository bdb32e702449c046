"""Supervised fine-tuning on a file or a list, in chunks with a schedule of learning rates.

    for chunk in create_sft_dataset_iterator(trajectories, batch_size=2, peak_lr=2e-4):
        await model.train_sft(chunk.trajectories, chunk.config)

A chunk is one call of `train_sft`, which makes one checkpoint, and holds `chunk_size` batches with a rate for each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from art.config import TrainSFTConfig
from art.config.training import share_at
from art.errors import ConfigError, TrajectoryError
from art.trajectory import Trajectory

Schedule = Literal["cosine", "linear", "constant"]
AUTO_BATCH_SIZE = 2
CHUNK_SIZE = 10


@dataclass(frozen=True, slots=True)
class SFTChunk:
    """Trajectories and settings for one call of `train_sft`, with their place in the data."""

    trajectories: list[Trajectory]
    config: TrainSFTConfig
    step: int
    """Number of the chunk's first batch, from 0, over all epochs."""
    epoch: int
    """Number of the epoch, from 0."""
    epoch_step: int
    """Number of the chunk's first batch within the epoch."""


def create_lr_schedule(
    total_steps: int, peak_lr: float, method: Schedule = "linear", warmup_steps: int = 0, min_lr: float = 0.0
) -> list[float]:
    """The learning rate of each batch: a rise from `min_lr` to `peak_lr` over `warmup_steps`, then a fall to `min_lr`.

    The last batch of the warm-up has `peak_lr`, and the last of all has `min_lr`. `ScheduleConfig` differs: it never
    reaches 0.

    Example: 6 steps, peak 1, linear, 2 steps of warm-up: [0.5, 1.0, 1.0, 2/3, 1/3, 0.0].
    """
    if method not in ("cosine", "linear", "constant"):
        raise ConfigError(f"a schedule is 'cosine', 'linear' or 'constant', got {method!r}")
    rise = [(step + 1) / warmup_steps for step in range(min(warmup_steps, total_steps))]
    num_falling = total_steps - len(rise)
    fall = [share_at(method, i, warmup_steps=0, total_steps=num_falling - 1) for i in range(num_falling)]
    return [min_lr + (peak_lr - min_lr) * share for share in (*rise, *fall)]


def create_sft_dataset_iterator(
    trajectories: Iterable[Trajectory],
    chunk_size: int = CHUNK_SIZE,
    epochs: int = 1,
    batch_size: int = AUTO_BATCH_SIZE,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    shuffle: bool = True,
    seed: int = 42,
    initial_step: int = 0,
    show_progress: bool = True,
) -> Iterator[SFTChunk]:
    """Yield chunks of `chunk_size` batches, each for one call of `model.train_sft`.

    Each epoch has another order, and no chunk spans two epochs.

    Args:
        initial_step: Batch to begin with; from there on the chunks are those of an uninterrupted run.
    """
    from tqdm.auto import tqdm

    items = list(trajectories)
    per_epoch = -(-len(items) // batch_size)
    total = per_epoch * epochs
    rates = create_lr_schedule(total, peak_lr, schedule_type, int(warmup_ratio * total))
    with tqdm(desc="sft", unit="batch", total=total, initial=initial_step, disable=not show_progress) as bar:
        for epoch in range(initial_step // per_epoch if per_epoch else epochs, epochs):
            order = list(items)
            if shuffle:
                random.Random(f"{seed}/{epoch}").shuffle(order)
            for first in range(max(0, initial_step - epoch * per_epoch), per_epoch, chunk_size):
                end = min(first + chunk_size, per_epoch)
                step = epoch * per_epoch + first
                config = TrainSFTConfig(learning_rate=rates[step : step + end - first], batch_size=batch_size)
                yield SFTChunk(order[first * batch_size : end * batch_size], config, step, epoch, first)
                bar.update(end - first)


def iterate_file(
    file_path: str | Path, epochs: int = 1, shuffle_buffer_size: int = 10_000, seed: int = 42, initial_skip: int = 0
) -> Iterator[Trajectory]:
    """Yield the conversations of a file of JSON lines, `{"messages": [...], "tools": [...]}`, in random order.

    Args:
        shuffle_buffer_size: Rows that are held to draw from at random; 0 keeps the order of the file.
        initial_skip: Conversations to leave out at the beginning.

    Raises:
        TrajectoryError: a row is not a conversation that ends with an assistant message.
    """

    def rows() -> Iterator[Trajectory]:
        for epoch in range(epochs):
            rng, held = random.Random(f"{seed}/{epoch}"), list[Trajectory]()
            for row in _rows(Path(file_path)):
                held.append(row)
                if len(held) > shuffle_buffer_size:
                    yield held.pop(rng.randrange(len(held)))
            rng.shuffle(held)
            yield from held

    return islice(rows(), initial_skip, None)


def _rows(path: Path) -> Iterator[Trajectory]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                trajectory = Trajectory(messages_and_choices=row["messages"], tools=row.get("tools"))
                last = trajectory.messages()[-1]["role"]
            except (ValueError, LookupError, TypeError) as error:
                raise TrajectoryError(
                    f'{path}, line {number} is not a conversation: expected {{"messages": [...]}}, with "tools" if '
                    f"there are any; {type(error).__name__}: {error}"
                ) from error
            if last != "assistant":
                raise TrajectoryError(f"{path}, line {number}: the last message must be the assistant's, got {last!r}")
            yield trajectory


async def train_sft_from_file(
    model: Any,
    file_path: str | Path,
    epochs: int = 1,
    batch_size: int | Literal["auto"] = AUTO_BATCH_SIZE,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    initial_step: int = 0,
    final_step: int | None = None,
    _config: Mapping[str, Any] | None = None,
    verbose: bool = False,
    shuffle_buffer_size: int = 10_000,
) -> None:
    """Fine-tune a registered model on a file of conversations (see `iterate_file`). Ten batches make a checkpoint.

    Args:
        initial_step: Batch to begin with.
        final_step: Batch to end before; by default the last one of all epochs.
    """
    size = resolve_sft_batch_size(batch_size)
    total = -(-get_file_row_count(file_path) * epochs // size)
    rates = create_lr_schedule(total, peak_lr, schedule_type, int(warmup_ratio * total))
    end = total if final_step is None else min(final_step, total)
    rows = iterate_file(file_path, epochs, shuffle_buffer_size, initial_skip=initial_step * size)
    for first in range(initial_step, end, CHUNK_SIZE):
        chunk_rates = rates[first : min(first + CHUNK_SIZE, end)]
        chunk = list(islice(rows, len(chunk_rates) * size))
        config = TrainSFTConfig(learning_rate=chunk_rates, batch_size=size)
        await model.train_sft(chunk, config, verbose=verbose, _config=_config)


def get_file_row_count(file_path: str | Path) -> int:
    """Number of rows in a file of JSON lines, without empty ones."""
    with Path(file_path).open(encoding="utf-8") as file:
        return sum(bool(line.strip()) for line in file)


def resolve_sft_batch_size(batch_size: int | Literal["auto"]) -> int:
    """The number of trajectories per optimiser update; "auto" is 2."""
    return AUTO_BATCH_SIZE if batch_size == "auto" else batch_size
