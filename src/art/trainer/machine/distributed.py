"""Several processes train as one.

All of them make the same `Trainer` calls, on the same samples and the same checkpoint, and differ only in which
micro-batches they run. Between them go

    the gradient    one sum per update, of the adapter's flat vector (gloo on CPU, NCCL on CUDA)
    the record      gathered once per update, so that each knows, judges and reports the whole step
    streams         log-probs without gradient (references, anchor), gathered likewise
    errors          with whatever is gathered next, so that what fails in one fails in all, and the next call finds
                    them all ready
    files           written by the first process; the others wait for what came of it
    base weights    only with `shard_base`, layer by layer, by `fully_shard`

After the sum all make the same optimiser update on the same bytes (both libraries give every process the same sum), so
adapter and moments never need to be sent. One process alone does without torch.distributed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from art.config import TrainerConfig
from art.errors import ArtError, ConfigError, ProcessError
from art.trainer.policy.base_model import choose_device

_log = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_TIMEOUT = timedelta(days=365)
"""Of objects: processes wait for the next call as long as nobody trains."""
_STEP_TIMEOUT = timedelta(hours=12)
"""Of tensors. Who is late or gone is for the supervisor to say, long before."""


class _ElsewhereError(Exception):
    """Another process failed with `error`."""

    def __init__(self, error: ArtError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Team:
    """The processes that train together, seen from one of them; by default one alone."""

    rank: int = 0
    size: int = 1
    objects: Any = None
    """The group through which Python objects go: gloo on every device, and patient."""

    @classmethod
    def from_environment(cls, config: TrainerConfig) -> Team:
        """Meet the processes that `torchrun` started with this one; returns when all are there. Alone without it.

        Raises:
            ConfigError: this machine has fewer devices than processes.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return ALONE
        device, local_size = choose_device(config), int(os.environ["LOCAL_WORLD_SIZE"])
        num_devices = {"cpu": local_size, "cuda": torch.cuda.device_count()}.get(device.type, 1)
        if num_devices < local_size:
            raise ConfigError(
                f"the trainer is to run {local_size} processes, each on a device of its own, but this machine has "
                f"{num_devices} of {device.type!r}",
                param="num_processes",
            )
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # from here on "cuda" means this one
        dist.init_process_group(backend, timeout=_STEP_TIMEOUT)
        team = cls(dist.get_rank(), size, dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT))
        _log.info("process %d of %d joined (%s)", team.rank, size, backend)
        return team

    @contextlib.contextmanager
    def call(self, *, in_lockstep: bool = False) -> Iterator[None]:
        """What all processes do inside succeeds in all of them, or raises in all of them.

        The process that fails tells the others where they next `gather`, at the latest at the end of the block. Where
        they work `in_lockstep`, meeting within every layer, that may be never: the team then cannot go on.

        Raises:
            ArtError: what another process raised; if that was none, its type and message.
            ProcessError: another process is gone, or this one fell out of step.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
            self.gather(None)
        except _ElsewhereError as elsewhere:
            raise elsewhere.error from None
        except ProcessError:
            raise
        except Exception as error:
            if not isinstance(error, ArtError):
                _log.exception("process %d failed", self.rank)
                told = ArtError(f"{type(error).__name__}: {error} (in process {self.rank} of {self.size})")
                if in_lockstep:
                    raise ProcessError(f"{told.message}; the others cannot go on without it") from error
            else:
                told = error
            with contextlib.suppress(_ElsewhereError):
                self._exchange(None, told)
            raise

    def gather(self, value: T) -> list[T]:
        """What every process has, by rank. For use within `call`."""
        return [value] if self.size == 1 else self._exchange(value, None)

    def _exchange(self, value: T, error: ArtError | None) -> list[T]:
        answers: list[Any] = [None] * self.size
        with _losing_nobody():
            dist.all_gather_object(answers, (error, value), group=self.objects)
        for failure, _ in answers:
            if failure is not None:
                raise _ElsewhereError(failure)
        return [value for _, value in answers]

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first process; the others do not call it. For use within `call`."""
        self.gather(None)  # not while another process fails
        value = make() if self.rank == 0 else None
        self.gather(None)  # a failure to make it ends the call here
        return self.broadcast(value)  # type: ignore[return-value]  # what `make` made

    def broadcast(self, value: T) -> T:
        """The first process's value."""
        values = [value]
        if self.size > 1:
            with _losing_nobody():
                dist.broadcast_object_list(values, src=0, group=self.objects)
        return values[0]

    def sum_gradients(self, grads: Tensor) -> None:
        """Add up, in place and on every process."""
        if self.size > 1:
            with _losing_nobody():
                dist.all_reduce(grads)


@contextlib.contextmanager
def _losing_nobody() -> Iterator[None]:
    """Communication fails when another process has died."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed has no narrower one for it
        raise ProcessError(f"the connection to the trainer's other processes broke: {error}") from error


ALONE = Team()
