"""Samples in a file: nothing is lost or rounded, each grammar is there once, and the tree is that of the lists."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from art.errors import InvalidRequestError
from art.protocol.compact import SpanValues, read_samples, spans_of, write_samples
from art.protocol.samples import ConstrainedSpan, Constraint, TrainingSample, plain_sample
from art.trainer.tree import build_tree, check_sample, check_samples, sort_paths
from tests.support.trainer_samples import VOCAB_SIZE, make_sample, random_samples

ANSWER = Constraint(grammar='start: "yes"', stop_token_ids=[2, 7], kept=[[2, 900]])
paths_of_few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def sent(samples: list[TrainingSample], directory: Path) -> list[TrainingSample]:
    write_samples(directory / "samples", samples)
    return read_samples(directory / "samples")


def varied(seed: int) -> list[TrainingSample]:
    """Samples with every field set in some of them."""
    rng = random.Random(seed)
    changes: list[dict[str, Any]] = [
        {},
        {"share": 0.3, "policy_version": 7, "versions": [(0, 7), (2, 9)]},
        {"component": "sft", "weight": 1 / 3},
        {"temperature": 0.1 + 0.2, "rollout_id": "other"},
    ]
    samples = [replace(sample, **rng.choice(changes)) for sample in random_samples(seed)]
    for number in range(0, len(samples), 3):
        span = ConstrainedSpan(start=1, num_tokens=1, constraint=rng.choice([ANSWER, Constraint(stop_token_ids=[1])]))
        teacher = [rng.gauss(0, 1) if masked else 0.0 for masked in samples[number].loss_mask]
        samples[number] = replace(samples[number], teacher_logprobs=teacher, constraints=[span])
    return samples


@pytest.mark.parametrize("seed", range(20))
def test_samples_cross_without_a_change(seed: int, tmp_path: Path) -> None:
    samples = varied(seed)
    read = sent(samples, tmp_path)
    assert read == samples
    assert sent(read, tmp_path) == samples  # from what was read, as from lists


def test_no_samples_and_samples_without_a_target(tmp_path: Path) -> None:
    assert sent([], tmp_path) == []
    zeros = [0.0] * len(random_samples(1)[0].token_ids)
    empty = replace(random_samples(1)[0], loss_mask=list(map(bool, zeros)), sampling_logprobs=zeros, advantages=zeros)
    assert sent([empty], tmp_path) == [empty]


def test_numbers_that_json_does_not_know_cross_too(tmp_path: Path) -> None:
    [sample] = random_samples(0, count=1)
    infinite = [math.inf if masked else 0.0 for masked in sample.loss_mask]
    strange = replace(sample, sampling_logprobs=infinite, weight=math.inf)
    assert sent([strange], tmp_path) == [strange]
    [read] = sent([replace(sample, advantages=[math.nan] * len(sample.token_ids))], tmp_path)
    assert [math.isnan(value) for value in read.advantages] == sample.loss_mask


@pytest.mark.parametrize("name", ["sampling_logprobs", "teacher_logprobs", "loss_mask"])
def test_a_stream_that_does_not_fit_its_sample_is_refused(name: str, tmp_path: Path) -> None:
    odd = replace(random_samples(0, count=1)[0], **{name: [1.0]})
    with pytest.raises(InvalidRequestError, match=f"sample 's0' has 1 values in `{name}`"):
        sent([odd], tmp_path)


def test_each_grammar_is_there_once(tmp_path: Path) -> None:
    rng = random.Random(0)
    text = "start: " + " | ".join(f'"{number}"' for number in range(500))
    span = ConstrainedSpan(start=1, num_tokens=1, constraint=Constraint(grammar=text, kept=[list(range(0, 50_000, 5))]))
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(1000)]
    samples = [
        replace(make_sample(f"s{i}", [*shared, i, 5], rng), constraints=[span], loss_mask=[False] * 1001 + [True])
        for i in range(20)
    ]
    samples = [replace(s, sampling_logprobs=[0.0] * 1001 + [-1.0], advantages=[0.0] * 1001 + [1.0]) for s in samples]
    assert sent(samples, tmp_path) == samples
    arrays = load_file(tmp_path / "samples")
    assert arrays["header"].tobytes().count(b'\\"499\\"') == 1


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6))
def test_the_tree_is_that_of_the_lists(tmp_path: Path, seed: int) -> None:
    samples = varied(seed)
    one_by_one = [path for sample in samples if (path := check_sample(sample, vocab_size=VOCAB_SIZE)) is not None]
    read = check_samples(sent(samples, tmp_path), vocab_size=VOCAB_SIZE)
    picked = random.Random(seed).sample(range(len(read)), random.Random(seed).randrange(1, len(read) + 1))
    first, second = build_tree([one_by_one[i] for i in picked]), build_tree([read[i] for i in picked])
    for name in ("token_ids", "positions", "subtree_end"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    for name in ("queries", "token_ids", "sampling_logprobs", "advantages", "weights", "temperatures", "samples"):
        assert np.array_equal(getattr(first.targets, name), getattr(second.targets, name))


@settings(max_examples=300, deadline=None)
@given(paths_of_few_tokens, st.randoms(use_true_random=False))
def test_paths_are_sorted_and_shared_as_plain_lists_are(paths: list[list[int]], rng: random.Random) -> None:
    inputs = [path[: rng.randrange(1, len(path) + 1)] for path in paths]
    checked = check_samples([sample_of(str(i), path) for i, path in enumerate(inputs)], vocab_size=VOCAB_SIZE)
    assert [path.token_ids.tolist() for path in checked] == inputs
    chosen = sorted(rng.sample(range(len(paths)), rng.randrange(1, len(paths) + 1)))
    expected = sorted(chosen, key=lambda i: (inputs[i], str(i)))
    shared = [0] + [num_shared(inputs[a], inputs[b]) for a, b in itertools.pairwise(expected)]
    order, found = sort_paths([checked[i] for i in chosen])
    assert ([chosen[i] for i in order], found) == (expected, shared)


def sample_of(name: str, inputs: list[int]) -> TrainingSample:
    """A sample whose only target follows these tokens."""
    sample = plain_sample([*inputs, 1], name)
    return replace(sample, loss_mask=[False] * len(inputs) + [True])


def num_shared(first: list[int], second: list[int]) -> int:
    return next(
        (k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_paths_that_were_checked_one_by_one_or_twice_are_sorted_too() -> None:
    one, other = (check_sample(sample_of(name, [1, 2]), vocab_size=VOCAB_SIZE) for name in "ba")
    assert one is not None
    assert other is not None
    assert sort_paths([one, other]) == ([1, 0], [0, 2])
    (again,) = check_samples([one.sample], vocab_size=VOCAB_SIZE)
    assert sort_paths([again, again]) == ([0, 1], [0, 2])


def test_sequences_behave_like_lists() -> None:
    mask = SpanValues(5, np.asarray([[1, 2], [3, 5]]), np.ones(3, dtype=np.bool_))
    assert mask == [False, True, False, True, True]
    assert mask == [False, True, False, True, True]
    assert mask != [False] * 5
    assert (mask[1], mask[2:4], list(mask), sum(mask), len(mask)) == (True, [False, True], list(mask), 3, 5)
    assert spans_of([False, True, False, True, True]).tolist() == spans_of(mask).tolist() == [[1, 2], [3, 5]]
    assert spans_of([]).tolist() == []
    path = SpanValues.whole(np.asarray([4, 5, 6], dtype=np.uint32))
    assert (path == [4, 5, 6], path[-1], path[:2], len(path)) == (True, 6, [4, 5], 3)
    assert (path == 3) is False


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "a"])
def test_a_token_that_is_none_is_refused(token: Any, tmp_path: Path) -> None:
    sample = replace(random_samples(0)[0], token_ids=[1, token])
    with pytest.raises(InvalidRequestError, match="sample 's0' has a token that is no token id"):
        write_samples(tmp_path / "samples", [sample])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_is_reported_as_the_operating_system_does() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_samples(Path("/dev/full"), random_samples(0))


def test_a_missing_or_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    with pytest.raises(InvalidRequestError, match=r"the file of training samples .* cannot be read"):
        read_samples(path)
    write_samples(path, random_samples(0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(InvalidRequestError, match="cannot be read: SafetensorError"):
        read_samples(path)
    path.write_bytes(whole)
    arrays = load_file(path)
    save_file({name: array for name, array in arrays.items() if name != "spans"}, path)
    with pytest.raises(InvalidRequestError, match="KeyError: 'spans'"):
        read_samples(path)
