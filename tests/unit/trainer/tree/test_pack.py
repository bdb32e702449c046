from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from art.protocol.samples import plain_sample
from art.trainer.tree.pack import group_by_rollout, pack, split_batches, split_minibatches
from art.trainer.tree.tree import SamplePath, build_tree, check_sample

paths_of_few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=12)


def checked(paths: list[list[int]], rollouts: list[int] | None = None) -> list[SamplePath]:
    result = []
    for i, path in enumerate(paths):
        rollout = str(rollouts[i] if rollouts else i)
        sample = replace(plain_sample(path, "probe"), sample_id=f"{i:02}", rollout_id=rollout)
        result.append(check_sample(sample, vocab_size=10))
    return [path for path in result if path is not None]


@settings(max_examples=300)
@given(paths_of_few_tokens, st.integers(1, 40))
def test_every_sample_once_and_within_the_budget(tokens: list[list[int]], max_tokens: int) -> None:
    paths = checked(tokens)
    bins = pack(paths, max_tokens=max_tokens)
    assert sorted(index for indices in bins for index in indices) == list(range(len(paths)))
    for indices in bins:
        tree = build_tree([paths[index] for index in indices])
        distinct = {paths[index].token_ids.tobytes() for index in indices}
        assert len(tree) <= max_tokens or len(distinct) == 1


@given(paths_of_few_tokens, st.integers(1, 40), st.randoms(use_true_random=False))
def test_does_not_depend_on_the_order_of_samples(tokens: list[list[int]], max_tokens: int, rng: object) -> None:
    paths = checked(tokens)
    shuffled = list(paths)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]

    def names(bins: list[list[int]], of: list[SamplePath]) -> list[list[str]]:
        return [[of[index].sample.sample_id for index in indices] for indices in bins]

    assert names(pack(paths, max_tokens=max_tokens), paths) == names(pack(shuffled, max_tokens=max_tokens), shuffled)


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


@given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(1, 6))
def test_minibatches_are_consecutive_balanced_and_not_empty(lengths: list[int], num_minibatches: int) -> None:
    paths = checked([[i % 10] * length for i, length in enumerate(lengths)])
    parts = split_minibatches(paths, num_minibatches)
    assert [path for part in parts for path in part] == paths
    assert len(parts) == min(num_minibatches, len(paths))
    assert all(parts)
    longest = max(len(path.token_ids) for path in paths)
    fair = sum(len(path.token_ids) for path in paths) / len(parts)
    assert all(sum(len(path.token_ids) for path in part) <= fair + longest * len(parts) for part in parts)


def test_branches_of_a_rollout_stay_together() -> None:
    paths = checked([[1, 2]] * 6, rollouts=[0, 1, 0, 2, 1, 3])
    assert [[p.sample.sample_id for p in r] for r in group_by_rollout(paths)] == [
        ["00", "02"],
        ["01", "04"],
        ["03"],
        ["05"],
    ]
    for part in split_minibatches(paths, 2):
        ids = {path.sample.rollout_id for path in part}
        assert sum(path.sample.rollout_id in ids for path in paths) == len(part)
    assert [len(batch) for batch in split_batches(paths, 3)] == [5, 1]
