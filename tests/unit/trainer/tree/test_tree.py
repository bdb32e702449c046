from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art.errors import TrajectoryError
from art.protocol.samples import plain_sample
from art.trainer.tree import PrefixTree, SamplePath, build_tree, check_sample
from art.trainer.tree_attention import dense_mask, flex_rule
from tests.support.trainer_samples import VOCAB_SIZE, make_sample, paths_of, random_samples

# Few different tokens, so that paths often share prefixes, repeat and extend each other.
paths_of_few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=8)


def tree_of(paths: list[list[int]]) -> tuple[PrefixTree, list[SamplePath]]:
    samples = [replace(plain_sample(path, "probe"), sample_id=str(i)) for i, path in enumerate(paths)]
    return build_tree(paths_of(samples)), paths_of(samples)


def visible(tree: PrefixTree, query: int) -> list[int]:
    """Keys that a query attends by the rule."""
    return [key for key in range(query + 1) if query < tree.subtree_end[key]]


def test_worked_example_of_the_docstring() -> None:
    tree, _ = tree_of([[5, 6, 7, 8, 0], [5, 6, 9, 0], [5, 6, 7, 3, 3, 0]])
    assert tree.token_ids.tolist() == [5, 6, 7, 3, 3, 8, 9]
    assert tree.positions.tolist() == [0, 1, 2, 3, 4, 3, 2]
    assert tree.subtree_end.tolist() == [7, 7, 6, 5, 5, 6, 7]


@settings(max_examples=40)
@given(paths_of_few_tokens)
def test_every_query_sees_exactly_its_own_sequence(paths: list[list[int]]) -> None:
    tree, samples = tree_of(paths)
    targets = tree.targets
    start = 0
    for sample in samples:
        for target in range(start, start + len(sample.query_positions)):
            query = int(targets.queries[target])
            keys = visible(tree, query)
            place = int(sample.query_positions[target - start])
            assert tree.token_ids[keys].tolist() == sample.sample.token_ids[: place + 1]
            assert tree.positions[keys].tolist() == list(range(place + 1))
            assert targets.token_ids[target] == sample.sample.token_ids[place + 1]
        start += len(sample.query_positions)


@settings(max_examples=40)
@given(paths_of_few_tokens)
def test_every_prefix_is_laid_out_once(paths: list[list[int]]) -> None:
    tree, _ = tree_of(paths)
    prefixes = {tuple(path[: i + 1]) for path in paths for i in range(len(path) - 1)}
    assert len(tree) == len(prefixes)


@settings(max_examples=40)
@given(paths_of_few_tokens, st.randoms(use_true_random=False))
def test_layout_does_not_depend_on_the_order_of_samples(paths: list[list[int]], rng: random.Random) -> None:
    tree, samples = tree_of(paths)
    shuffled = list(samples)
    rng.shuffle(shuffled)
    other = build_tree(shuffled)
    for name in ("token_ids", "positions", "subtree_end"):
        assert np.array_equal(getattr(tree, name), getattr(other, name))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_dense_mask_and_flex_rule_are_the_rule(window: int | None) -> None:
    tree = build_tree(paths_of(random_samples(3)))
    positions, ends = torch.from_numpy(tree.positions), torch.from_numpy(tree.subtree_end)
    mask = dense_mask(positions, ends, window)
    rule = flex_rule(positions, ends, window)
    for q in range(len(tree)):
        seen = [k for k in visible(tree, q) if window is None or tree.positions[q] - tree.positions[k] < window]
        assert mask[q].nonzero()[:, 0].tolist() == seen
        index = torch.arange(len(tree))
        assert rule(None, None, torch.tensor(q), index).nonzero()[:, 0].tolist() == seen


def test_targets_keep_what_samples_say() -> None:
    sample = replace(
        make_sample("a", [4, 5, 6, 7, 8], random.Random(0)),
        loss_mask=[False, False, True, False, True],
        sampling_logprobs=[0, 0, -1.5, 0, -2.5],
        advantages=[0, 0, 0.25, 0, -0.5],
        weight=0.5,
        temperature=0.0,
        component="sft",
    )
    targets = build_tree(paths_of([sample])).targets
    assert targets.queries.tolist() == [1, 3]
    assert targets.token_ids.tolist() == [6, 8]
    assert targets.sampling_logprobs.tolist() == [-1.5, -2.5]
    assert targets.advantages.tolist() == [0.25, -0.5]
    assert targets.weights.tolist() == [0.5, 0.5]
    assert targets.temperatures.tolist() == [1.0, 1.0]  # greedy: log-probs are of the unscaled distribution
    assert not targets.is_rl.any()


def test_equal_tokens_merge_and_keep_their_targets() -> None:
    tree = build_tree(
        paths_of(
            [replace(plain_sample([1, 2, 3], "probe"), sample_id=name, weight=w) for name, w in (("a", 1), ("b", 2))]
        )
    )
    assert tree.token_ids.tolist() == [1, 2]
    assert sorted(zip(tree.targets.queries, tree.targets.weights, strict=True)) == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_tokens_behind_the_last_query_are_not_laid_out() -> None:
    sample = replace(plain_sample([1, 2, 3, 4, 5], "probe"), loss_mask=[False, True, False, False, False])
    assert len(build_tree(paths_of([sample]))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [True, True]}, "has 3 tokens but 2 mask entries"),
        ({"advantages": [0.0]}, "1 advantages"),
        ({"token_ids": [1, 2, VOCAB_SIZE]}, "outside the model's vocabulary of 61"),
        ({"token_ids": [1, -1, 2]}, "outside the model's vocabulary"),
        ({"loss_mask": [True, False, True]}, "first token"),
        ({"sampling_logprobs": [0.0, float("nan"), 0.0]}, "not finite"),
        ({"advantages": [0.0, 0.0, float("inf")]}, "not finite"),
        ({"weight": -1.0}, "weight -1.0"),
        ({"temperature": -0.1}, "temperature -0.1"),
    ],
)
def test_malformed_samples_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message) as raised:
        check_sample(replace(plain_sample([1, 2, 3], "probe"), sample_id="game 7", **change), vocab_size=VOCAB_SIZE)
    assert "game 7" in str(raised.value)


@pytest.mark.parametrize("change", [{"loss_mask": [False] * 3}, {"weight": 0.0}])
def test_nothing_to_learn(change: dict[str, object]) -> None:
    assert check_sample(replace(plain_sample([1, 2, 3], "probe"), **change), vocab_size=VOCAB_SIZE) is None
