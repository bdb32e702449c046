"""Moments in 8 bits: how exact they are, and that nothing changes when they go to disk and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from art.config import OptimizerConfig
from art.trainer.machine.distributed import Team
from art.trainer.step import moments
from art.trainer.step.moments import BLOCK, MOMENTS, BlockMoments, FloatMoments, make_table
from art.trainer.step.optimizer import Optimizer
from tests.support.trainer_files import save_content, whole

CONFIG = OptimizerConfig(weight_decay=0.01)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "_CHUNK", 2)


def random_grads(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 10 ** torch.empty(size).uniform_(-4, 0, generator=generator)


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_has_256_fractions_close_to_zero(signed: bool) -> None:
    table = make_table(signed=signed)
    assert len(table.unique()) == 256
    assert bool((table.diff() > 0).all())
    assert (table[0], table[-1]) == (-1 if signed else 0, 1)
    inner = table[table > 1e-3]
    assert float((inner.diff() / inner[:-1]).max()) < (0.6 if signed else 0.3)


@pytest.mark.parametrize("size", [1, BLOCK, 5 * BLOCK + 17])
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_was_decoded_is_encoded_exactly(size: int, moment: str) -> None:
    numbers = random_grads(size, 1) if moment == "exp_avg" else random_grads(size, 1) ** 2
    held = BlockMoments(torch.zeros(size), torch.zeros(size))
    held.store(moment, numbers)
    once = held.read(moment, 0, size)
    largest = torch.nn.functional.pad(numbers, (0, -size % BLOCK)).view(-1, BLOCK).abs().amax(1)
    assert float(((once - numbers).abs() / largest.repeat_interleave(BLOCK)[:size]).max()) < 0.01
    held.store(moment, once)
    assert torch.equal(held.read(moment, 0, size), once)
    assert torch.equal(held.read(moment, size // 2, size), once[size // 2 :])


def test_a_mean_square_never_becomes_zero_while_the_mean_is_not() -> None:
    held = BlockMoments(torch.zeros(2), torch.tensor([1.0, 1e-6]))
    for _ in range(3):
        held.update(0.0, CONFIG)
    held._grads.zero_()
    for _ in range(20):
        held.update(0.1, CONFIG)
    assert float(held.read("exp_avg_sq", 1, 2)) > 0
    assert float(held._values.abs().max()) < 3  # 20 updates of 0.1 at most, and not of 0.1 / eps


def test_updates_follow_those_of_float32() -> None:
    """Fit a badly scaled least-squares problem with both: the losses agree."""
    size = 3 * BLOCK + 5
    scales, target = 10 ** torch.linspace(-2, 0, size), random_grads(size, 2)
    losses = {}
    for kind in (FloatMoments, BlockMoments):
        values, grads = torch.zeros(size), torch.zeros(size)
        held: Any = kind(values, grads)
        for _ in range(200):
            grads.copy_(scales * (values - target) + 0.01 * random_grads(size, int(held.num_updates)))
            held.update(0.01, OptimizerConfig())
        losses[kind] = float((scales * (values - target) ** 2).sum())
        assert held.num_updates == 200
    start = float((scales * target**2).sum())
    assert losses[FloatMoments] < 0.1 * start
    assert abs(losses[BlockMoments] - losses[FloatMoments]) < 0.02 * start


def make_policy(size: int) -> Any:
    values, grads = torch.zeros(size), torch.zeros(size)
    return SimpleNamespace(values=values, grads=grads, tensors={"b": values[:300].view(3, 100), "a": values[300:]})


@pytest.mark.parametrize("bits", [8, 32])
def test_training_goes_on_from_the_file_as_if_it_had_not_stopped(bits: int, tmp_path: Any) -> None:
    size = 4 * BLOCK + 9
    first, second = make_policy(size), make_policy(size)
    optimizer = Optimizer(first, bits=bits)
    for step in range(3):
        first.grads.copy_(random_grads(size, step))
        optimizer.update(0.1, CONFIG)
    file = save_content(tmp_path / "moments", optimizer.stream())
    second.values.copy_(first.values)
    other = Optimizer(second, bits=bits)
    other.load(file, num_updates=3)
    assert whole(other.stream()) == file.read_bytes()
    for policy, each in ((first, optimizer), (second, other)):
        policy.grads.copy_(random_grads(size, 9))
        each.update(0.1, CONFIG)
    assert torch.equal(first.values, second.values)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("num_processes", [2, 3, 8])
def test_processes_that_share_the_moments_update_as_one_does(bits: int, num_processes: int, tmp_path: Any) -> None:
    """The processes take turns here. What one sends is kept, for the others to receive it."""
    size = 4 * BLOCK + 9
    alone, policies = make_policy(size), [make_policy(size) for _ in range(num_processes)]
    sent: dict[tuple[int, int], torch.Tensor] = {}

    def join(rank: int) -> Team:
        def send(tensor: torch.Tensor, source: int) -> None:
            key = (source, tensor.data_ptr() - policies[rank].values.data_ptr())
            if source == rank:
                sent[key] = tensor.clone()
            elif key in sent:
                tensor.copy_(sent[key])

        return cast(Team, SimpleNamespace(rank=rank, size=num_processes, send=send))

    single = Optimizer(alone, bits=bits)
    shared = [Optimizer(policy, join(rank), bits=bits) for rank, policy in enumerate(policies)]
    for step in range(3):
        for policy, optimizer in [(alone, single), *zip(policies, shared, strict=True)]:
            policy.grads.copy_(random_grads(size, step))
            optimizer.update(0.1, CONFIG)
    merged = torch.cat([policy.values[o._start : o._end] for policy, o in zip(policies, shared, strict=True)])
    assert torch.equal(merged, alone.values)
    file = save_content(tmp_path / "moments", single.stream())
    for optimizer in shared:
        held = [optimizer._moments.read(moment, 0, optimizer._end - optimizer._start) for moment in MOMENTS]
        optimizer.load(file, num_updates=3)
        again = [optimizer._moments.read(moment, 0, optimizer._end - optimizer._start) for moment in MOMENTS]
        assert all(torch.equal(a, b) for a, b in zip(held, again, strict=True))
