"""Reading a shared prefix once must change the cost of a step and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from art.engines.torch.cache import shared_prefix
from art.engines.torch.cache.kv_cache import LayerShape, Pool, Slot
from art.engines.torch.weights.norm import RmsNorm
from tests.support.engine import VOCAB, generate, load, make_model, request, tokens

GROUPS = ((60, 5), (90, 3), (40, 1), (120, 4))
"""Length of the prompt, and number of requests."""


@pytest.fixture
def free_of_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share whatever can be shared, also where it does not pay."""
    monkeypatch.setattr(shared_prefix, "STEP_COST", -1)
    monkeypatch.setattr(shared_prefix, "COPIES", 1)


def sample_groups(model: Path, *, shares: bool) -> list:
    engine = load(model)
    for pool in engine._scheduler.cache.pools:
        pool.can_share = pool.can_share and shares
    rng = random.Random(3)
    requests = [
        request(tokens(length, length) + tokens(100 * length + i, i), rng.randrange(3, 30), seed=100 * length + i)
        for length, count in GROUPS
        for i in range(count)
    ]
    rng.shuffle(requests)
    return generate(engine, *requests)


@pytest.mark.usefixtures("free_of_cost")
@pytest.mark.parametrize("window", [None, 48])
def test_groups_sample_the_same_with_and_without_sharing(
    models: Path, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(models / f"mistral-{window}", "mistral", sliding_window=window)
    calls = []
    original = shared_prefix.attend_to_prefixes
    monkeypatch.setattr(shared_prefix, "attend_to_prefixes", lambda *args: calls.append(1) or original(*args))
    want = sample_groups(model, shares=False)
    assert not calls
    got = sample_groups(model, shares=True)
    assert bool(calls) == (window is None)  # layers with a window read only what it shows
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)


def filled_pool(sequences: list[list[int]], uids: list[int] | None = None) -> Pool:
    pool = Pool(256, [LayerShape(2, 8, 8)], torch.float32, "cpu")
    pool.resize([], len(sequences))
    for row, sequence in enumerate(sequences):
        pool.put(Slot(pool, row, uids[row] if uids else 0), row)
        pool.record(np.full(len(sequence), row), np.arange(len(sequence)), np.array(sequence))
    return pool


def found(pool: Pool, rows: list[int]) -> tuple[list[int], list[int]] | None:
    """Members and lengths."""
    positions = pool.num_computed[rows]
    sharing = shared_prefix.find_sharing(pool, np.array(rows), positions, torch.zeros(1))
    return None if sharing is None else (sharing.members.tolist(), sharing.lengths.tolist())


@pytest.mark.usefixtures("free_of_cost")
def test_the_longest_prefixes_are_found() -> None:
    system, first, second = tokens(1, 40), tokens(2, 60), tokens(3, 80)
    sequences = [system + ending + [i] * 5 for i in range(1, 5) for ending in (first, second)]
    alone = tokens(4, 90)
    assert found(filled_pool([*sequences, alone]), list(range(9))) == (list(range(8)), [100, 120] * 4)
    assert found(filled_pool([*sequences[:2], alone]), [0, 1, 2]) == ([0, 1], [40, 40])


@pytest.mark.usefixtures("free_of_cost")
def test_hundreds_of_nested_prefixes_are_searched_in_part() -> None:
    longest = tokens(1, 250)
    assert found(filled_pool([longest[:n] + [VOCAB] for n in range(40, 250)]), list(range(210))) is not None


@pytest.mark.usefixtures("free_of_cost")
def test_rows_of_other_adapters_and_new_sequences_do_not_share() -> None:
    pool = filled_pool([tokens(1, 90)] * 3, uids=[1, 2, 1])
    assert found(pool, [0, 1, 2]) == ([0, 2], [90, 90])
    pool.put(Slot(pool, 2, 1), 2)
    pool.record(np.full(90, 2), np.arange(90), np.array(tokens(2, 90)))
    assert found(pool, [0, 1, 2]) is None


def test_what_saves_less_than_it_costs_is_not_shared() -> None:
    pool = filled_pool([tokens(1, 90)] * 8)
    assert found(pool, list(range(8))) is None  # 8 * 90 * 128 bytes
    pool = filled_pool([tokens(1, 200)] * 80)
    assert found(pool, list(range(80))) == (list(range(80)), [200] * 80)


@pytest.mark.parametrize("shape", [(64,), (6, 16)])
def test_rms_norm_is_that_of_torch(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    x = torch.randn(5, *shape, generator=generator) * torch.tensor([1e-4, 1.0, 1e4, 0.0, 1.0]).view(
        -1, *[1] * len(shape)
    )
    want = F.rms_norm(x, shape[-1:], None, 1e-6) * weight
    torch.testing.assert_close(RmsNorm(weight, 1e-6)(x), want, rtol=2e-6, atol=1e-6)
    half = RmsNorm(weight.bfloat16(), 1e-6)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), want, rtol=0.02, atol=0.02)
