"""The prefix tree of a step against a tree that is built token by token."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from art.storage.step_files import RecordedSample, TokenReason
from art_page.tree import LEARNT, MAX_RUNS, UNLEARNT, build_nodes, choose_nodes, count_computed, mark_targets


def recorded(paths: list[list[int]], targets: list[list[int]], passes: list[int]) -> list[RecordedSample]:
    """The index of sorted paths. The inputs of a path end before its last target."""
    samples = []
    for number, (path, places) in enumerate(zip(paths, targets, strict=True)):
        shared = 0
        if number:
            before = paths[number - 1][:-1]
            while shared < min(len(before), len(path) - 1) and before[shared] == path[shared]:
                shared += 1
        samples.append(
            RecordedSample(
                sample_id=f"s{number}", rollout_id=f"r{number}", group_id=None, component="rl",
                num_inputs=len(path) - 1, shared=shared, spans=[[place, place + 1] for place in places], weight=1.0,
                scale=1.0, temperature=1.0, policy_version=0, update=0, micro_batch=passes[number],
            )
        )  # fmt: skip
    return samples


def random_paths(rng: random.Random, count: int) -> list[list[int]]:
    """Sorted by their inputs, as the trainer lays them out. Several begin alike, extend or repeat one another."""
    paths: list[list[int]] = []
    for _ in range(count):
        old = rng.choice(paths)[:-1] if paths and rng.random() < 0.8 else []
        cut = rng.randrange(len(old) + 1)
        paths.append([*old[:cut], *(rng.randrange(3) for _ in range(rng.randrange(1, 6))), 9])
    return sorted(paths, key=lambda path: path[:-1])


@pytest.mark.parametrize("seed", range(20))
def test_nodes_are_the_runs_of_a_trie(seed: int) -> None:
    rng = random.Random(seed)
    paths = random_paths(rng, rng.randrange(1, 12))
    targets = [sorted({*rng.sample(range(1, len(p)), rng.randrange(len(p))), len(p) - 1}) for p in paths]
    passes = sorted(rng.randrange(3) for _ in paths)
    samples = recorded(paths, targets, passes)
    reasons = np.asarray([rng.choice([0, 3, 7]) for places in targets for _ in places], dtype=np.uint8)
    first = [0, *np.cumsum([len(places) for places in targets]).tolist()]

    through = defaultdict(list)  # by prefix, the paths that compute it, or end with it
    marks: dict[tuple, int] = defaultdict(int)
    place = 0
    for number, (path, places) in enumerate(zip(paths, targets, strict=True)):
        for depth in range(1, len(path) + 1):
            prefix = (*path[:depth], number) if depth == len(path) else tuple(path[:depth])
            through[prefix].append(number)
            if depth - 1 in places:
                mark = LEARNT if reasons[place] == TokenReason.TRAINED else UNLEARNT
                marks[prefix] = max(marks[prefix], mark)
                place += 1

    nodes = build_nodes(samples)
    mark_targets(nodes, samples, reasons, first)
    covered = {}
    for node in nodes:
        path = paths[node.first_path]
        for depth in range(node.start + 1, node.end + 1):
            prefix = (*path[:depth], node.first_path) if depth == len(path) else tuple(path[:depth])
            assert prefix not in covered
            covered[prefix] = (node.num_paths, 0 if node.marks is None else int(node.marks[depth - 1 - node.start]))
            assert through[prefix] == list(range(node.first_path, node.first_path + node.num_paths))
            assert node.passes == {passes[number] for number in through[prefix]}
    assert covered == {prefix: (len(numbers), marks[prefix]) for prefix, numbers in through.items()}
    computed = {
        (passes[number], *path[:depth]) for number, path in enumerate(paths) for depth in range(1, len(path))
    }  # fmt: skip
    assert count_computed(samples) == len(computed)
    for node in nodes:  # as few nodes as possible: one that has a single child would be one with it
        assert len(node.children) != 1 or node.children[0].num_paths < node.num_paths
    assert [node.number for node in nodes] == list(range(len(nodes)))


def test_runs_of_a_node_are_joined_where_there_are_too_many() -> None:
    length = 4 * MAX_RUNS
    sample = recorded([list(range(length + 2))], [list(range(1, length + 2))], [0])
    reasons = np.asarray([TokenReason.TRAINED, TokenReason.CLIPPED] * (length // 2) + [TokenReason.TRAINED])
    nodes = build_nodes(sample)
    mark_targets(nodes, sample, reasons.astype(np.uint8), [0, len(reasons)])
    assert nodes[0].runs() == [(1, length + 2, LEARNT)]
    assert (nodes[0].count(LEARNT), nodes[0].count(UNLEARNT)) == (length // 2 + 1, length // 2)


def test_the_widest_nodes_are_chosen_with_all_above_them() -> None:
    rng = random.Random(1)
    paths = random_paths(rng, 60)
    samples = recorded(paths, [[len(path) - 1] for path in paths], [0] * 60)
    nodes = build_nodes(samples)
    for limit in (1, 10, 40):
        chosen = choose_nodes(nodes, None, limit)
        numbers = {node.number for node in chosen}
        assert len(chosen) == limit
        assert all(node.parent is None or node.parent.number in numbers for node in chosen)
        left = [n for n in nodes if n.number not in numbers and (n.parent is None or n.parent.number in numbers)]
        assert min(node.tokens_below for node in chosen) >= max((node.tokens_below for node in left), default=0)
    top = next(node for node in nodes if node.num_below > 3)
    assert [node.number for node in choose_nodes(nodes, top, 100)] == [top.number + i for i in range(1 + top.num_below)]
