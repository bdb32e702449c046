"""The choice of the replica for a prompt."""

from __future__ import annotations

from art.engines.routing import BLOCK, SLACK, Router, prefix_hashes


def prompt(seed: int, num_blocks: int = 3) -> list[int]:
    return [seed + i for i in range(num_blocks * BLOCK)]


def test_prefixes_are_hashed_at_whole_blocks_with_the_adapter() -> None:
    hashes = prefix_hashes("a", prompt(0))
    assert len(hashes) == 3
    assert prefix_hashes("a", prompt(0)[: 2 * BLOCK + 5]) == hashes[:2]
    assert prefix_hashes("a", [*prompt(0)[:-1], 7])[:2] == hashes[:2]
    changed = prefix_hashes("a", [7, *prompt(0)[1:]])
    assert not set(hashes) & set(changed)
    assert not set(hashes) & set(prefix_hashes("b", prompt(0)))


def test_a_conversation_stays_on_its_replica() -> None:
    router = Router(3)
    for seed in range(50):
        first = router.choose("a", prompt(1000 * seed, 1))
        router.running[first] += 1
    for seed in range(50):
        where = {router.choose("a", prompt(1000 * seed, blocks)) for blocks in (2, 3, 4)}
        assert len(where) == 1
        assert where == {router.choose("a", prompt(1000 * seed, 1))}
    assert max(router.running) - min(router.running) <= 1


def test_a_busy_replica_is_avoided() -> None:
    router = Router(2)
    first = router.choose("a", prompt(0))
    router.running[first] = 2 * SLACK + 20
    assert router.choose("a", prompt(0)) != first


def test_a_longer_known_prefix_wins() -> None:
    router = Router(2)
    one = router.choose("a", prompt(0, 1))
    router.running[one] = 1
    router.forget(one)
    two = router.choose("a", prompt(0, 3))
    assert two != one
    router.running[one] = 0
    router.running[two] = 1
    assert router.choose("a", prompt(0, 3)) == two


def test_a_forgotten_prefix_does_not_count() -> None:
    router = Router(2)
    first = router.choose("a", prompt(0))
    router.running[first] = 1
    router.forget(first)
    assert router.choose("a", prompt(0)) != first


def test_a_failed_replica_is_avoided_unless_it_is_the_only_one() -> None:
    router = Router(2)
    first = router.choose("a", prompt(0))
    router.avoid(first)
    other = router.choose("a", prompt(0))
    assert other != first
    router.avoid(other)
    assert router.choose("a", prompt(0)) in (0, 1)


def test_only_the_replicas_that_hold_the_policy_are_chosen_among() -> None:
    router = Router(3)
    first = router.choose("a", prompt(0))
    others = [number for number in range(3) if number != first]
    assert router.choose("a", prompt(0), among=others) in others
    assert router.choose("a", prompt(0), among=[first]) == first


def test_a_replica_that_has_no_room_is_avoided() -> None:
    router = Router(2)
    router.room = [2, 8]
    router.running = [2, 3]
    router.choose("a", prompt(0), among=[0])
    assert router.choose("a", prompt(0)) == 1, "though the other has the prompt"
    router.running = [2, 8]
    assert router.choose("a", prompt(0)) in (0, 1), "all are full, and the queue of an engine takes it"
