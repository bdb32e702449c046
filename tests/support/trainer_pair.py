"""Two processes that train together over gloo, and the same work by this process alone.

A `Pair` has each of its processes call a function of a module with its own `Member`, and returns what came of it by
rank: the result, or the exception.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from art.config import LoraConfig, TrainerConfig
from art.protocol.calls import SampleFile, Train, TrainSft
from art.protocol.samples import StepResult, TrainingSample
from art.storage import checkpoints
from art.trainer import trainer
from art.trainer.distributed import ALONE, Team
from art.trainer.step import update
from art.trainer.step.micro_batch import split_micro_batches
from art.trainer.step.record import StepRecord
from art.trainer.step.replay import Replayer
from art.trainer.step.update import Update, compute_gradient
from art.trainer.trainer import Trainer
from art.trainer.tree import check_sample
from tests.support.ports import free_port
from tests.support.trainer_samples import make_gate

LORA = LoraConfig(rank=8, alpha=16)
_MODULES = {"trainer": trainer, "update": update, "checkpoints": checkpoints}
NUM_PROCESSES = 2


@dataclass
class Member:
    """One process and the trainers that it made, by model and settings."""

    team: Team = ALONE
    trainers: dict[str, Trainer] = field(default_factory=dict)

    def trainer(self, model_path: str, *, shard_base: bool = False, **settings: Any) -> Trainer:
        """Sharding needs several processes; alone the base stays whole."""
        config = TrainerConfig(
            device="cpu",
            num_threads=1,
            num_processes=self.team.size,
            shard_base=shard_base and self.team.size > 1,
            **settings,
        )
        key = f"{model_path} {config!r}"
        if key not in self.trainers:
            self.trainers[key] = Trainer(model_path, config, self.team)
        return self.trainers[key]


class Pair:
    """Two processes that wait for work."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._pipes, self._processes = [], []
        for rank in range(NUM_PROCESSES):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            self._processes.append(context.Process(target=_serve, args=(theirs, _variables(rank, port)), daemon=True))
            self._processes[-1].start()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results = []
        for pipe in self._pipes:
            assert pipe.poll(180), "a process hangs"
            results.append(pipe.recv())
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _variables(rank: int, port: int) -> dict[str, str]:
    numbers = {"MASTER_PORT": port, "WORLD_SIZE": NUM_PROCESSES, "LOCAL_WORLD_SIZE": NUM_PROCESSES}
    numbers |= {"RANK": rank, "LOCAL_RANK": rank}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


def _serve(pipe: Any, variables: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ |= variables
    member = Member(Team.from_environment(TrainerConfig(device="cpu", num_processes=NUM_PROCESSES)))
    while True:
        function, args, kwargs = pipe.recv()
        try:
            result = function(member, *args, **kwargs)
        except Exception as error:
            result = error
        pipe.send(result)


# -- what members do --


@dataclass(frozen=True)
class Gradient:
    grads: np.ndarray  # [P]
    record: StepRecord
    num_micro_batches: int  # of this process
    num_tokens: int  # of this process's trees


def gradient(
    member: Member,
    model_path: str,
    samples: list[TrainingSample],
    loss: dict[str, Any],
    max_tokens: int,
    lora: LoraConfig | None = LORA,
    **settings: Any,
) -> Gradient:
    """Of one update, on a policy that has random matrices."""
    trainer = member.trainer(model_path, **settings)
    policy = trainer._resident.start_fresh(lora).policy
    policy.values.copy_(0.1 * torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(0)))
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=trainer._base.vocab_size))]
    record = StepRecord()
    with member.team.call():
        paths, _ = Replayer(model_path, policy.base.vocab_size, member.team).replay(paths)
        paths = [path for path in paths if not path.refusal]
        micro_batches = split_micro_batches(paths, policy.base, max_tokens=max_tokens, team=member.team)
        compute_gradient(
            policy,
            Update(paths=paths, learning_rate=1.0, **loss | {"mismatch": make_gate(paths, loss.get("mismatch"))}),
            micro_batches,
            record,
            team=member.team,
        )
    num_tokens = sum(len(micro_batch.layout.token_ids) for micro_batch in micro_batches)
    return Gradient(policy.grads.numpy().copy(), record, len(micro_batches), num_tokens)


def init(member: Member, model_path: str, directory: Any, **settings: Any) -> StepResult:
    return member.trainer(model_path, **settings).init_checkpoint(directory / "0000", LORA)


def train(
    member: Member,
    model_path: str,
    directory: Any,
    number: int,
    *,
    kind: type[Train] | type[TrainSft] = Train,
    settings: Any = (),
    to: Any = None,
    **arguments: Any,
) -> StepResult:
    """Step `number` in `directory`, written there under its number or as `to`."""
    trainer = member.trainer(model_path, **dict(settings))
    call = kind(
        from_checkpoint=directory / f"{number - 1:04d}",
        to_checkpoint=to or directory / f"{number:04d}",
        job_id=f"job-{number}",
        record_to=directory / "steps" / f"{number:04d}",
        **arguments,
    )
    return trainer.train(call)


def trial(member: Member, model_path: str, samples: SampleFile) -> dict[str, float]:
    return member.trainer(model_path).trial(samples, LORA)


def held_weights(member: Member, model_path: str, **settings: Any) -> dict[str, int]:
    """Numbers of the base weights that this process has, of the layers and of the rest."""
    counts = {"layers": 0, "rest": 0}
    for name, parameter in member.trainer(model_path, **settings)._base.model.named_parameters():
        if "lora_" not in name:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            counts["layers" if ".layers." in name else "rest"] += local.numel()
    return counts


def with_failure(
    member: Member,
    rank: int,
    where: str,
    error: Exception,
    function: Callable[..., Any],
    *args: Any,
    once: bool = False,
    **kwargs: Any,
) -> Any:
    """`function`, in which process `rank` fails at `where`: each time, or only the first time."""
    module, name = where.split(".")
    original, errors = (
        getattr(_MODULES[module], name),
        itertools.chain([error], itertools.repeat(None if once else error)),
    )

    def failing(*args: Any, **kwargs: Any) -> Any:
        if (raised := next(errors)) is not None:
            raise raised
        return original(*args, **kwargs)

    changed = mock.patch.object(_MODULES[module], name, failing)
    with changed if member.team.rank == rank else contextlib.nullcontext():
        return function(member, *args, **kwargs)


def budget(member: Member, model_path: str) -> int:
    """Tokens that the trainer puts into a micro-batch at most."""
    return member.trainer(model_path)._batcher.max_tokens


def raise_inside(member: Member, error: Exception, *, in_lockstep: bool) -> None:
    with member.team.call(in_lockstep=in_lockstep):
        raise error


@contextlib.contextmanager
def pair_of_processes() -> Iterator[Pair]:
    pair = Pair()
    try:
        yield pair
    finally:
        pair.close()
