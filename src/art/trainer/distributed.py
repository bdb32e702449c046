"""Several processes train as one.

All of them make the same `Trainer` calls, on the same samples and the same checkpoint, and differ only in which
micro-batches they run. Between them go

    the gradient    one sum per update, of the adapter's flat vector (gloo on CPU, NCCL on CUDA)
    the record      gathered once per update, so that each knows, judges and reports the whole step
    files           written by the first process; the others wait for what came of it
    base weights    only with `shard_base`, layer by layer, by `fully_shard`

After the sum all make the same optimiser update, so adapter and moments never need to be sent. One process alone does
without torch.distributed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from art.errors import ArtError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_TIMEOUT = timedelta(days=365)
"""Of objects: processes wait for the next call as long as nobody trains."""
_STEP_TIMEOUT = timedelta(hours=12)
"""Of tensors. Who is late or gone is for the supervisor to say, long before."""


@dataclass(frozen=True, slots=True)
class Team:
    """The processes that train together, seen from one of them; by default one alone."""

    rank: int = 0
    size: int = 1
    objects: Any = None
    """The group through which Python objects go: gloo on every device, and patient."""

    def sum_gradients(self, grads: Tensor) -> None:
        """Add up, in place and on every process."""
        if self.size > 1:
            dist.all_reduce(grads)

    def gather(self, value: T) -> list[T]:
        """What every process has, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.objects)
        return values

    def broadcast(self, value: T) -> T:
        """The first process's value."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.objects)
        return values[0]

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns, or raises, on the first process; the others do not call it.

        A failure that only one process knew of would leave the others waiting for it.
        """
        value: T | None = None
        error: ArtError | None = None
        if self.rank == 0:
            try:
                value = make()
            except ArtError as raised:
                error = raised
        value, error = self.broadcast((value, error))
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # what `make` made


ALONE = Team()


def join_team(rank: int, size: int, device: torch.device, store: dist.Store) -> Team:
    """Meet the other processes at `store`; returns when all are there."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(rank)  # from here on "cuda" means this one
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_STEP_TIMEOUT)
    team = Team(rank, size, dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT))
    _log.info("process %d of %d joined (%s)", rank, size, backend)
    return team
