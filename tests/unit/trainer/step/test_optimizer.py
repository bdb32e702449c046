"""The moments of the optimiser: shared over processes, and on disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from art.config import OptimizerConfig
from art.trainer.distributed import Team
from art.trainer.step.update import Optimizer
from tests.support.trainer_files import save_content, whole

CONFIG = OptimizerConfig(weight_decay=0.01)
SIZE = 1033


def random_grads(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, generator=generator) * 10 ** torch.empty(SIZE).uniform_(-4, 0, generator=generator)


def make_policy() -> Any:
    values, grads = torch.zeros(SIZE), torch.zeros(SIZE)
    return SimpleNamespace(values=values, grads=grads, tensors={"b": values[:300].view(3, 100), "a": values[300:]})


def test_training_goes_on_from_the_file_as_if_it_had_not_stopped(tmp_path: Any) -> None:
    first, second = make_policy(), make_policy()
    optimizer = Optimizer(first)
    for step in range(3):
        first.grads.copy_(random_grads(step))
        optimizer.update(0.1, CONFIG)
    file = save_content(tmp_path / "moments", optimizer.stream())
    second.values.copy_(first.values)
    other = Optimizer(second)
    other.load(file, num_updates=3)
    assert whole(other.stream()) == file.read_bytes()
    for policy, each in ((first, optimizer), (second, other)):
        policy.grads.copy_(random_grads(9))
        each.update(0.1, CONFIG)
    assert torch.equal(first.values, second.values)


@pytest.mark.parametrize("num_processes", [2, 3, 8])
def test_processes_that_share_the_moments_update_as_one_does(num_processes: int, tmp_path: Any) -> None:
    """The processes take turns here. What one sends is kept, for the others to receive it."""
    alone, policies = make_policy(), [make_policy() for _ in range(num_processes)]
    sent: dict[tuple[int, int], torch.Tensor] = {}

    def join(rank: int) -> Team:
        def send(tensor: torch.Tensor, source: int) -> None:
            key = (source, tensor.data_ptr() - policies[rank].values.data_ptr())
            if source == rank:
                sent[key] = tensor.clone()
            elif key in sent:
                tensor.copy_(sent[key])

        return cast(Team, SimpleNamespace(rank=rank, size=num_processes, send=send))

    single = Optimizer(alone)
    shared = [Optimizer(policy, join(rank)) for rank, policy in enumerate(policies)]
    for step in range(3):
        for policy, optimizer in [(alone, single), *zip(policies, shared, strict=True)]:
            policy.grads.copy_(random_grads(step))
            optimizer.update(0.1, CONFIG)
    merged = torch.cat([policy.values[o._start : o._end] for policy, o in zip(policies, shared, strict=True)])
    assert torch.equal(merged, alone.values)
    file = save_content(tmp_path / "moments", single.stream())
    for policy, optimizer in zip(policies, shared, strict=True):  # from the file of one they go on as before
        optimizer.load(file, num_updates=3)
        policy.values.copy_(alone.values)
        policy.grads.copy_(random_grads(7))
        optimizer.update(0.1, CONFIG)
    alone.grads.copy_(random_grads(7))
    single.update(0.1, CONFIG)
    merged = torch.cat([policy.values[o._start : o._end] for policy, o in zip(policies, shared, strict=True)])
    assert torch.equal(merged, alone.values)
