"""Several processes that train as one.

All of them make the same `Trainer` calls, on the same samples and the same checkpoint, and differ only in which
micro-batches they run. They exchange

    the gradient    one sum per update, of the flat vector of trained weights (gloo on CPU, NCCL on CUDA). All processes
                    get the same bytes
    the record      gathered once per update, so that every process judges and reports the whole step; so are streams
    errors          sent with the next gather, so that a failure in one process fails the call in all of them
    weights         after an update each sends the part that it updated, and its moments when a checkpoint is written
    files           the first process writes them, and tells the others the outcome
    base weights    only with `shard_base`: layer by layer, by `fully_shard`

A single process does not use torch.distributed.
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
"""Timeout of collectives of Python objects. Processes wait for the next call while nobody trains."""
_STEP_TIMEOUT = timedelta(hours=12)
"""Timeout of tensor collectives. The supervisor notices a late or dead process much earlier."""


class _ElsewhereError(Exception):
    """Another process failed with `error`."""

    def __init__(self, error: ArtError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Team:
    """The processes that train together, as one of them sees it. The default is a single process."""

    rank: int = 0
    size: int = 1
    objects: Any = None
    """Process group for Python objects: gloo on every device, with a long timeout."""

    @classmethod
    def from_environment(cls, config: TrainerConfig) -> Team:
        """Join the processes that were started with this one, by the variables of `torchrun`. Without them, return
        `ALONE`.

        Raises:
            ConfigError: this machine has fewer devices than processes here.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return ALONE
        device, num_here = choose_device(config), int(os.environ["LOCAL_WORLD_SIZE"])
        num_devices = {"cpu": num_here, "cuda": torch.cuda.device_count()}.get(device.type, 1)
        if num_devices < num_here:
            raise ConfigError(
                f"the trainer needs {num_here} devices of type {device.type!r}, one for each process, but this "
                f"machine has {num_devices}; set `num_processes` to at most that",
                param="num_processes",
            )
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # from here on "cuda" means this one
        dist.init_process_group(backend, timeout=_STEP_TIMEOUT)
        objects = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        team = cls(dist.get_rank(), size, objects)
        _log.info("process %d of %d joined (%s)", team.rank, size, backend)
        return team

    @contextlib.contextmanager
    def call(self, *, in_lockstep: bool = False) -> Iterator[None]:
        """Make the block succeed in all processes, or raise in all of them.

        A process that fails tells the others at their next `gather`, at the latest at the end of the block: there its
        error is raised too, as an `ArtError`. Processes that work `in_lockstep` meet in every layer and may never reach
        that point; then the team cannot go on, as where another process is gone, and a `ProcessError` is raised.
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
            told = error
            if not isinstance(told, ArtError):
                _log.exception("process %d failed", self.rank)
                told = ArtError(f"{type(error).__name__}: {error} (in process {self.rank} of {self.size})")
                if in_lockstep:
                    raise ProcessError(f"{told.message}; the others cannot go on without it") from error
            with contextlib.suppress(_ElsewhereError):
                self._exchange(None, told)
            raise

    def gather(self, value: T) -> list[T]:
        """Collect `value` from all processes and return the values by rank. For use within `call`."""
        return [value] if self.size == 1 else self._exchange(value, None)

    def _exchange(self, value: T, error: ArtError | None) -> list[T]:
        answers: list[Any] = [None] * self.size
        with _reporting_lost_processes():
            dist.all_gather_object(answers, (error, value), group=self.objects)
        for failure, _ in answers:
            if failure is not None:
                raise _ElsewhereError(failure)
        return [value for _, value in answers]

    def from_first(self, make: Callable[[], T], meanwhile: Callable[[], object] | None = None) -> T:
        """Call `make` on the first process, `meanwhile` on the others; return its result on all. Use it within `call`.

        Both must exchange the same tensors, even where `make` fails.
        """
        self.gather(None)  # do not start while another process fails
        value = make() if self.rank == 0 else None
        if self.rank > 0 and meanwhile is not None:
            meanwhile()
        self.gather(None)  # if `make` failed, the call ends here in all processes
        return self.broadcast(value)  # type: ignore[return-value]  # what `make` made

    def broadcast(self, value: T) -> T:
        """Return on all processes the value that the first process passed."""
        values = [value]
        if self.size > 1:
            with _reporting_lost_processes():
                dist.broadcast_object_list(values, src=0, group=self.objects)
        return values[0]

    def send(self, tensor: Tensor, source: int) -> None:
        """Give `tensor` on every process the content that it has on process `source`, in place."""
        if self.size > 1:
            with _reporting_lost_processes():
                dist.broadcast(tensor, src=source)

    def sum_gradients(self, grads: Tensor) -> None:
        """Replace `grads` by the sum over all processes, in place."""
        if self.size > 1:
            with _reporting_lost_processes():
                dist.all_reduce(grads)


@contextlib.contextmanager
def _reporting_lost_processes() -> Iterator[None]:
    """Turn failed communication into a `ProcessError`: it means that another process died."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises nothing more specific
        raise ProcessError(f"lost the connection to the trainer's other processes: {error}") from error


ALONE = Team()
