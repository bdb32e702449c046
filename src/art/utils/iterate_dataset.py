"""Iterates over a data set in shuffled batches, and can continue at any step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class DatasetBatch(Generic[T]):
    """The items of a data set for one training step, with the numbers of step and epoch.

    It unpacks like the tuple of older code: `batch, epoch, global_step, epoch_step`.
    """

    items: list[T]
    step: int
    """Number of the batch, from 0, over all epochs."""
    epoch: int
    """Number of the epoch, from 0."""
    epoch_step: int
    """Number of the batch within the epoch, from 0."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.items, self.epoch, self.step, self.epoch_step))


def iterate_dataset(
    dataset: Sequence[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
    *,
    seed: int = 0,
) -> Iterator[DatasetBatch[T]]:
    """Yield a data set in batches of `groups_per_step` items. Each epoch has another order and may end with fewer.

    The order depends only on `seed`, the epoch and the size of the data set: a run that begins at `initial_step` gets
    the same batches from there on as an uninterrupted run.
    """
    from tqdm.auto import tqdm

    if groups_per_step < 1:
        raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
    steps_per_epoch = -(-len(dataset) // groups_per_step)
    steps = range(initial_step, steps_per_epoch * num_epochs)
    total = len(steps) + initial_step
    with tqdm(desc="iterate", unit="step", total=total, initial=initial_step, disable=not use_tqdm) as bar:
        order: list[int] = []
        for step in steps:
            epoch, epoch_step = divmod(step, steps_per_epoch)
            if not order or epoch_step == 0:
                order = list(range(len(dataset)))
                random.Random(f"{seed}/{epoch}").shuffle(order)
            chosen = order[epoch_step * groups_per_step : (epoch_step + 1) * groups_per_step]
            yield DatasetBatch([dataset[i] for i in chosen], step, epoch, epoch_step)
            bar.update(1)
