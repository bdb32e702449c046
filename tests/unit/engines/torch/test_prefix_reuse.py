"""Reusing keys and values must change the cost of a request and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from art.engines.torch.embedded import TorchEngine
from art.engines.torch.kv_cache import LayerShape, Pool, Slot
from tests.support.engine import drain, generate, load, make_model, request, tokens


def assert_same(got: list, want: list) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.finish_reason == b.finish_reason


def alone(model: Path, *requests, **settings: object) -> list:
    """Each request in an engine that has seen nothing else."""
    engine = load(model, **settings)
    results = []
    for one in requests:
        results += generate(engine, one)
        for pool in engine._scheduler.cache.pools:
            for slot in filter(None, list(pool.slots)):
                engine._scheduler.cache.discard(slot)
    return results


def test_a_later_turn_continues_in_place(engine: TorchEngine, qwen3: Path) -> None:
    first = request(tokens(1, 50), 10)
    (one,) = generate(engine, first)
    second = request(first.prompt_token_ids + one.token_ids + tokens(2, 9), 10)
    (two,) = generate(engine, second)
    assert two.num_cached_tokens == 50 + 10 - 1  # the last sampled token was never computed
    assert engine.stats()["slots_idle"] == 1
    assert_same([two], alone(qwen3, second))


def test_a_group_computes_its_prompt_once(engine: TorchEngine, qwen3: Path) -> None:
    group = [request(tokens(1, 100), 10, seed=i) for i in range(8)]
    results = generate(engine, *group)
    assert engine.stats()["prefill_tokens"] == 100 + 7  # the last prompt token is computed again, for its logits
    assert [r.num_cached_tokens for r in results] == [0] + [99] * 7
    assert len({tuple(r.token_ids) for r in results}) == 8
    assert_same(results, alone(qwen3, *group))


def test_a_group_waits_for_a_prompt_that_takes_several_steps(qwen3: Path) -> None:
    engine = load(qwen3, prefill_tokens=16)
    group = [request(tokens(1, 100) + [i], 5, seed=i) for i in range(4)]
    results = generate(engine, *group)
    assert engine.stats()["prefill_tokens"] == 116  # of 4 x 101: what was left of the prompt was not worth waiting for
    assert_same(results, alone(qwen3, *group))


def test_branches_copy_their_common_prefix(engine: TorchEngine, qwen3: Path) -> None:
    trunk = tokens(1, 60)
    first = request(trunk + tokens(2, 20), 10)
    generate(engine, first)
    branch = request(trunk + tokens(3, 20), 10)
    (result,) = generate(engine, branch)
    assert result.num_cached_tokens == 60
    (again,) = generate(engine, request(first.prompt_token_ids, 10))
    assert again.num_cached_tokens == 79  # the branch left the original as it was
    assert_same([result], alone(qwen3, branch))


def test_a_running_request_can_be_copied_from(engine: TorchEngine, qwen3: Path) -> None:
    long = request(tokens(1, 40), 30)
    engine.submit(long, stream=False)
    for _ in range(5):
        engine.step()
    late = request(tokens(1, 40) + tokens(9, 3), 5)
    engine.submit(late, stream=False)
    chunks = {o.request_id: o.chunk for o in drain(engine)}
    assert chunks[late.request_id].num_cached_tokens == 40
    assert_same([chunks[long.request_id], chunks[late.request_id]], alone(qwen3, long, late))


def test_unloading_frees_the_slots_of_the_adapter(engine: TorchEngine, adapters: tuple[Path, Path]) -> None:
    engine.load_adapter("a@1", adapters[0])
    generate(engine, request(tokens(1, 20), 5, adapter="a@1"), request(tokens(1, 20), 5))
    engine.unload_adapter("a@1")
    assert engine.stats()["slots_idle"] == 1


@pytest.fixture(scope="module")
def once_alone(qwen3: Path) -> Callable[..., list]:
    """What `alone` gives, run once for requests that are the same in several tests."""
    known: dict[str, object] = {}

    def run(requests: list) -> list:
        keys = [repr(replace(one, request_id="")) for one in requests]
        new = {key: one for key, one in zip(keys, requests, strict=True) if key not in known}
        known.update(zip(new, alone(qwen3, *new.values()), strict=True))
        return [known[key] for key in keys]

    return run


@pytest.mark.parametrize("kv_cache_tokens", [None, 1024, 512])
def test_random_conversations_in_any_cache_size(
    qwen3: Path, kv_cache_tokens: int | None, once_alone: Callable[..., list]
) -> None:
    """Groups, turns, branches and long answers together, with room for all, for few, and for a single one."""
    random_ = random.Random(3)
    engine = load(qwen3, max_running=6, prefill_tokens=48, kv_cache_tokens=kv_cache_tokens)
    histories = [tokens(i, n) for i, n in enumerate((8, 30, 120, 240)) for _ in range(3)]
    asked, got = [], []
    for turn in range(3):
        turn_requests = []
        for i, history in enumerate(histories):
            prompt = history[: random_.choice((len(history), len(history) - 3))] + tokens(100 * turn + i // 2, 6)
            turn_requests.append(request(prompt, random_.choice((2, 20, 60)), seed=i, stop_token_ids=(5,)))
        results = generate(engine, *turn_requests)
        histories = [r.prompt_token_ids + c.token_ids for r, c in zip(turn_requests, results, strict=True)]
        asked += turn_requests
        got += results
    stats = engine.stats()
    assert stats["kv_tokens_allocated"] <= stats["kv_tokens_budget"]
    assert stats["slots_busy"] == 0
    if kv_cache_tokens is None:
        assert stats["cached_tokens"] > 1000
    else:
        assert stats["preemptions"] > 0
    assert_same(got, once_alone(asked))


def test_preempted_requests_reach_the_end_of_the_context(qwen3: Path) -> None:
    """One that is admitted again needs no room beyond the context, however long its answer may be."""
    settings = {"max_context": 320, "max_running": 3}
    requests = [request(tokens(i, 60), 260, seed=i) for i in range(3)]
    calm, busy = (load(qwen3, kv_cache_tokens=room, **settings) for room in (None, 640))
    assert_same(generate(busy, *requests), generate(calm, *requests))
    assert busy.stats()["preemptions"] > 0


@pytest.mark.parametrize("window", [None, 48])
def test_groups_that_read_their_prompt_together_sample_what_each_request_samples_alone(
    models: Path, window: int | None
) -> None:
    model = make_model(models / f"shared-{window}", "mistral", sliding_window=window)
    groups = [(90, 30), (120, 40), (200, 6), (40, 1)]  # tokens of the prompt, and requests: three groups are shared
    requests = [
        request(tokens(length, length) + tokens(1000 + i, i % 5), 3 + i % 9, seed=100 * length + i)
        for length, count in groups
        for i in range(count)
    ]
    random.Random(3).shuffle(requests)
    assert_same(generate(load(model, max_running=80), *requests), alone(model, *requests))


def shared(sequences: list[list[int]], uids: list[int] | None = None) -> tuple[int, list[int]] | None:
    """Length and members of the prefixes that a pool with these sequences reads once. A token has 8 kB."""
    pool = Pool(256, [LayerShape(2, 512, 512)], torch.float32, "cpu")
    pool.resize([], len(sequences))
    for row, sequence in enumerate(sequences):
        pool.put(Slot(pool, row, uids[row] if uids else 0), row)
        pool.start(row, np.array(sequence, np.int32), len(sequence))
    result = pool.shared_prefixes(np.arange(len(sequences)), pool.num_computed)
    return None if result is None else (result.length, result.members.tolist())


def test_the_prefix_that_saves_most_reads_is_shared() -> None:
    system, first, second, other = tokens(1, 40), tokens(2, 60), tokens(3, 80), tokens(4, 90)
    few = [system + ending + [i] * 5 for i in range(4) for ending in (first, second)]
    assert shared([*few, other]) == (40, list(range(8)))  # (8 - 3) x 40 reads saved, above (4 - 3) x (100 + 100)
    many = [system + ending + [i] * 5 for i in range(8) for ending in (first, second)]
    assert shared([*many, other]) == (100, list(range(16)))
    assert shared([*many, *many[:3], other]) == (100, list(range(19)))


def test_what_saves_too_little_or_has_other_weights_is_not_shared() -> None:
    prompt = tokens(1, 90)
    assert shared([prompt + [i] for i in range(4)]) is None  # (4 - 3) x 90 x 8 kB, less than 1 MB
    assert shared([prompt + [i] for i in range(5)]) == (90, list(range(5)))
    assert shared([prompt + [i] for i in range(6)], uids=[1, 2, 1, 1, 1, 1]) == (90, [0, 2, 3, 4, 5])
    assert shared([prompt + [i] for i in range(6)], uids=[1, 2, 1, 2, 1, 2]) is None


def test_a_row_with_another_sequence_is_searched_again() -> None:
    pool = Pool(256, [LayerShape(2, 512, 512)], torch.float32, "cpu")
    pool.resize([], 8)
    for row in range(8):
        pool.put(Slot(pool, row, 0), row)
        pool.start(row, np.array(tokens(1, 100), np.int32), 100)
    rows, positions = np.arange(8), np.full(8, 100)
    first = pool.shared_prefixes(rows, positions)
    assert first is not None
    assert pool.shared_prefixes(rows, positions + 1) is first  # the next token of the same sequences
    pool.start(2, np.array(tokens(2, 100), np.int32), 100)
    second = pool.shared_prefixes(rows, positions)
    assert second is not None
    assert second.members.tolist() == [0, 1, 3, 4, 5, 6, 7]
