from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.protocol.samples import plain_sample
from art.trainer.step.plans import split_batches, split_minibatches
from art.trainer.tree import (
    SamplePath,
    build_tree,
    check_sample,
    count_tree_tokens,
    deal,
    group_by_rollout,
    group_samples,
    pack,
    pack_shares,
)
from tests.support.trainer_samples import paths_of, random_samples

paths_of_few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=12)


def checked(
    paths: list[list[int]], rollouts: list[int] | None = None, groups: list[int] | None = None
) -> list[SamplePath]:
    result = []
    for i, path in enumerate(paths):
        rollout, group = str(rollouts[i] if rollouts else i), str(groups[i]) if groups else None
        sample = replace(plain_sample(path, "probe"), sample_id=f"{i:02}", rollout_id=rollout, group_id=group)
        result.append(check_sample(sample, vocab_size=10))
    return [path for path in result if path is not None]


@settings(max_examples=40)
@given(paths_of_few_tokens, st.integers(1, 40))
def test_every_sample_once_and_within_the_budget(tokens: list[list[int]], max_tokens: int) -> None:
    paths = checked(tokens)
    bins = pack(paths, max_tokens=max_tokens)
    assert sorted(index for indices in bins for index in indices) == list(range(len(paths)))
    for indices in bins:
        tree = build_tree([paths[index] for index in indices])
        distinct = {paths[index].token_ids.tobytes() for index in indices}
        assert len(tree) <= max_tokens or len(distinct) == 1


@settings(max_examples=40)
@given(paths_of_few_tokens, st.integers(1, 40), st.randoms(use_true_random=False))
def test_does_not_depend_on_the_order_of_samples(tokens: list[list[int]], max_tokens: int, rng: object) -> None:
    paths = checked(tokens)
    shuffled = list(paths)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]

    def names(bins: list[list[int]], of: list[SamplePath]) -> list[list[str]]:
        return [[of[index].sample.sample_id for index in indices] for indices in bins]

    assert names(pack(paths, max_tokens=max_tokens), paths) == names(pack(shuffled, max_tokens=max_tokens), shuffled)


@settings(max_examples=40)
@given(paths_of_few_tokens, st.integers(1, 40))
def test_without_branches_the_layout_is_whole_sequences(tokens: list[list[int]], max_tokens: int) -> None:
    """A path that extends another shares its sequence. The budget counts what is laid out."""
    paths = checked(tokens)
    for indices in pack(paths, max_tokens=max_tokens, branches=False):
        chosen = [paths[index] for index in indices]
        tree = build_tree(chosen, branches=False)
        assert len(tree) == count_tree_tokens(chosen, branches=False)
        starts = np.flatnonzero(tree.positions == 0).tolist()
        spans = [*pairwise([*starts, len(tree)])]
        assert len(tree) <= max_tokens or len(spans) == 1
        sequences = [tuple(tree.token_ids[start:end].tolist()) for start, end in spans]
        for start, end in spans:
            assert tree.positions[start:end].tolist() == list(range(end - start))
        for number, path in enumerate(chosen):
            wanted = tuple(path.token_ids.tolist())
            assert any(sequence[: len(wanted)] == wanted for sequence in sequences)
            of_path = tree.targets.samples == number
            for query, target in zip(tree.targets.queries[of_path], path.query_positions, strict=True):
                start = next(start for start, end in spans if start <= query < end)
                assert tree.positions[query] == target
                assert tree.token_ids[start : query + 1].tolist() == list(wanted[: target + 1])


def test_one_micro_batch_if_everything_fits() -> None:
    paths = checked([[0, 1, 2, 3], [0, 1, 5, 6], [7, 8, 9]])
    assert [sorted(indices) for indices in pack(paths, max_tokens=100)] == [[0, 1, 2]]


def test_cuts_at_the_border_of_groups() -> None:
    """Groups of six and four: the budget holds seven paths, but the cut goes behind the sixth."""
    members = [3, 4, 5, 6, 7, 8]
    tokens = [[0, g, *[9] * 3, m, m, m, 0] for g, size in ((1, 6), (2, 4)) for m in members[:size]]
    paths = checked(tokens)  # a single tree, by the common first token
    bins = pack(paths, max_tokens=len(build_tree(paths[:7])))
    assert sorted(sorted(indices) for indices in bins) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_small_trees_share_a_micro_batch_best_fit() -> None:
    paths = checked([[a] * 7 for a in range(3)] + [[a] * 5 for a in (3, 4, 5)])  # trees of 6, 6, 6, 4, 4, 4 tokens
    assert len(pack(paths, max_tokens=10)) == 3


def test_a_path_longer_than_the_budget_stands_alone() -> None:
    paths = checked([[1] * 50, [2, 3], [2, 4]])
    assert sorted(map(sorted, pack(paths, max_tokens=10))) == [[0], [1, 2]]


def num_targets(paths: Sequence[SamplePath]) -> int:
    return sum(len(path.query_positions) for path in paths)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(2, 30)), min_size=1, max_size=24),
    st.integers(1, 6),
    st.integers(0, 100),
)
def test_minibatches_are_whole_groups_and_balanced(
    members: list[tuple[int, int]], num_minibatches: int, seed: int
) -> None:
    """Every sample is in one mini-batch, with its whole group; sizes differ by at most the largest group."""
    paths = checked([[i % 10] * length for i, (_, length) in enumerate(members)], groups=[g for g, _ in members])
    parts = split_minibatches(paths, num_minibatches, seed=seed)
    assert sorted(path.sample.sample_id for part in parts for path in part) == [p.sample.sample_id for p in paths]
    groups = group_samples(paths)
    assert len(parts) == min(num_minibatches, len(groups))
    for group in groups:
        assert sum(any(path in part for path in group) for part in parts) == 1
    sizes = [num_targets(part) for part in parts]
    assert max(sizes) - min(sizes) <= max(num_targets(group) for group in groups)
    assert split_minibatches(paths, num_minibatches, seed=seed) == parts


def test_the_seed_shuffles_groups_and_nothing_else_does() -> None:
    groups = [i // 2 for i in range(24)]
    paths = checked([[i % 10] * 5 for i in range(24)], groups=groups)

    def names(seed: int) -> list[list[str]]:
        return [[path.sample.sample_id for path in part] for part in split_minibatches(paths, 3, seed=seed)]

    assert names(7)[0] == ["12", "13", "14", "15", "18", "19", "20", "21"], "the same on every machine"
    assert len({str(names(seed)) for seed in range(10)}) == 10
    assert split_minibatches(paths, 1, seed=7) == [paths]


@pytest.mark.parametrize(("num_sft", "parts_with_sft"), [(1, 1), (2, 2), (9, 3)])
def test_supervised_samples_are_spread_over_the_minibatches_of_the_groups(num_sft: int, parts_with_sft: int) -> None:
    """However long they are, each mini-batch has its part of the groups."""
    sampled = checked([[i] * 5 for i in range(6)], groups=[i // 2 for i in range(6)])
    given = [
        replace(path, sample=replace(path.sample, component="sft", group_id=None, rollout_id=f"sft[{i}]"))
        for i, path in enumerate(checked([[7] * 200] * num_sft))
    ]
    parts = split_minibatches([*sampled, *given], 3, seed=2)
    by_component = [Counter(path.sample.component for path in part) for part in parts]
    assert [counts["rl"] for counts in by_component] == [2, 2, 2]
    assert sum(counts["sft"] > 0 for counts in by_component) == parts_with_sft
    assert sum(counts["sft"] for counts in by_component) == num_sft
    assert [len(part) for part in split_minibatches(given, 3, seed=2)] == [num_sft // min(3, num_sft)] * min(3, num_sft)


def test_branches_of_a_rollout_stay_together() -> None:
    paths = checked([[1, 2]] * 6, rollouts=[0, 1, 0, 2, 1, 3])
    assert [[p.sample.sample_id for p in r] for r in group_by_rollout(paths)] == [
        ["00", "02"],
        ["01", "04"],
        ["03"],
        ["05"],
    ]
    for part in split_minibatches(paths, 2, seed=0):
        ids = {path.sample.rollout_id for path in part}
        assert sum(path.sample.rollout_id in ids for path in paths) == len(part)
    assert [len(batch) for batch in split_batches(paths, 3)] == [5, 1]


# -- dealing to processes --


def loads_of(paths: list[SamplePath], shares: list[list[list[int]]]) -> list[int]:
    """Tokens of the trees of each share."""
    return [sum(len(build_tree([paths[index] for index in batch])) for batch in share) for share in shares]


@given(sizes=st.lists(st.integers(1, 1000), max_size=40), num_shares=st.integers(1, 8))
def test_dealt_shares_differ_by_no_more_than_the_largest_piece(sizes: list[int], num_shares: int) -> None:
    shares = deal(sizes, num_shares)
    assert len(shares) == num_shares
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), count=st.integers(1, 30), max_tokens=st.integers(8, 200), num_shares=st.integers(1, 5)
)
def test_packed_shares(seed: int, count: int, max_tokens: int, num_shares: int) -> None:
    paths = paths_of(random_samples(seed, count))
    shares = pack_shares(paths, max_tokens=max_tokens, num_shares=num_shares)
    assert sorted(index for share in shares for batch in share for index in batch) == list(range(len(paths)))
    batches = [batch for share in shares for batch in share]
    sizes = [len(build_tree([paths[index] for index in batch])) for batch in batches]
    assert sizes == [count_tree_tokens([paths[index] for index in batch]) for batch in batches]
    longest = [max(len(paths[index].token_ids) for index in batch) for batch in batches]
    assert all(size <= max(max_tokens, alone) for size, alone in zip(sizes, longest, strict=True))
    loads = loads_of(paths, shares)
    assert max(loads) - min(loads) <= max(sizes)
    whole = [count_tree_tokens([paths[index] for index in batch]) for batch in pack(paths, max_tokens=max_tokens)]
    assert max(loads) <= sum(whole)  # never more to do than one process alone would have


def test_a_group_with_a_long_prompt_is_cut_once_per_process_and_not_to_pieces() -> None:
    prompt = list(range(40))
    paths = paths_of([plain_sample([*prompt, 41 + i, *[50] * 9], str(i)) for i in range(8)])
    shares = pack_shares(paths, max_tokens=1000, num_shares=2)
    assert [len(share) for share in shares] == [1, 1]
    assert loads_of(paths, shares) == [40 + 4 * 9] * 2  # the last token of a sample is only predicted


def test_one_sample_leaves_the_others_idle() -> None:
    assert pack_shares(paths_of([plain_sample([1, 2, 3], "0")]), max_tokens=64, num_shares=3) == [[[0]], [], []]
