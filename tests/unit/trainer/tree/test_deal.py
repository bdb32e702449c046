"""Work is dealt whole, and evenly by tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from art.protocol.samples import TrainingSample
from art.trainer.tree.pack import count_tree_tokens, deal, pack, pack_shares
from art.trainer.tree.tree import SamplePath, build_tree, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, random_samples


def paths_of(samples: list[TrainingSample]) -> list[SamplePath]:
    return [path for sample in samples if (path := check_sample(sample, vocab_size=VOCAB_SIZE))]


def sample(name: str, token_ids: list[int]) -> TrainingSample:
    return TrainingSample(
        sample_id=name,
        rollout_id=name,
        token_ids=token_ids,
        loss_mask=[i > 0 for i in range(len(token_ids))],
        sampling_logprobs=[0.0] * len(token_ids),
        advantages=[0.0] * len(token_ids),
    )


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


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 30),
    max_tokens=st.integers(8, 200),
    num_shares=st.integers(1, 5),
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


@given(seed=st.integers(0, 10_000), order=st.randoms(use_true_random=False))
def test_shares_do_not_depend_on_the_order_of_the_samples(seed: int, order: object) -> None:
    samples = random_samples(seed, 12)
    shuffled = list(samples)
    order.shuffle(shuffled)  # type: ignore[attr-defined]

    def by_name(samples: list[TrainingSample]) -> list[list[set[str]]]:
        paths = paths_of(samples)
        shares = pack_shares(paths, max_tokens=30, num_shares=2)
        return [[{paths[index].sample.sample_id for index in batch} for batch in share] for share in shares]

    assert by_name(samples) == by_name(shuffled)


def test_a_group_with_a_long_prompt_is_cut_once_per_process_and_not_to_pieces() -> None:
    prompt = list(range(40))
    paths = paths_of([sample(str(i), [*prompt, 41 + i, *[50] * 9]) for i in range(8)])
    shares = pack_shares(paths, max_tokens=1000, num_shares=2)
    assert [len(share) for share in shares] == [1, 1]
    assert loads_of(paths, shares) == [40 + 4 * 9] * 2  # the last token of a sample is only predicted


def test_unrelated_samples_are_dealt_evenly() -> None:
    paths = paths_of([sample(str(i), [i, *[60] * 10]) for i in range(30)])
    for num_shares in (2, 3, 5):
        loads = loads_of(paths, pack_shares(paths, max_tokens=100, num_shares=num_shares))
        assert max(loads) <= 1.1 * sum(loads) / num_shares


def test_one_sample_leaves_the_others_idle() -> None:
    assert pack_shares(paths_of([sample("0", [1, 2, 3])]), max_tokens=64, num_shares=3) == [[[0]], [], []]
