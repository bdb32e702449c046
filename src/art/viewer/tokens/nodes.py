"""Builds the prefix tree of a step from the index of its token file.

The index lists the paths in the depth-first order of the tree, and how much each shares with the one before it:

    lengths    5  4  3        shared    0  3  2
    nodes      [0, 2) all     [2, 3) of the first two     [3, 5) [3, 4) [2, 3) of one each

A path ends with its last target, which no forward pass had as input, so it is not shared with others.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from art.storage.steps.token_file import RecordedSample, TokenReason

MAX_RUNS = 24
"""Runs of targets of one node that are told apart."""
UNLEARNT, LEARNT = 1, 2
"""Marks of targets: one that no path learnt, and one that was learnt."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens that the same paths go through."""

    start: int
    end: int
    first_path: int
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    number: int = 0
    """Place in the depth-first order."""
    num_paths: int = 0
    num_below: int = 0
    """Nodes below this one."""
    tokens_below: int = 0
    """Tokens of this node and of those below it."""
    marks: NDArray[np.uint8] | None = None  # [num_tokens]
    """For each token: 0 no target, 1 a target that no path learnt, 2 learnt. `None` if there is no target."""
    passes: set[int] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def count(self, mark: int) -> int:
        """Count the tokens of a mark."""
        return 0 if self.marks is None else int((self.marks == mark).sum())

    def runs(self) -> list[tuple[int, int, int]]:
        """Begin, end and mark of each run of targets, as places in the sequences.

        Above `MAX_RUNS` of them, neighbouring targets are one run, with the mark that most of its tokens have.
        """
        if self.marks is None:
            return []
        runs = _runs(self.marks)
        if len(runs) > MAX_RUNS:
            runs = [
                (start, end, UNLEARNT + int((self.marks[start:end] == LEARNT).mean() >= 0.5))
                for start, end, _ in _runs((self.marks > 0).astype(np.uint8))
            ]
        return [(self.start + start, self.start + end, mark) for start, end, mark in runs]

    def above(self) -> list[Node]:
        """Return the nodes above this one, from the root on."""
        return [] if self.parent is None else [*self.parent.above(), self.parent]


def build_nodes(samples: Sequence[RecordedSample]) -> list[Node]:
    """Build the nodes of the tree, in depth-first order.

    Args:
        samples: those of the index, in its order, without refused ones.
    """
    roots: list[Node] = []
    trail: list[Node] = []  # the nodes of the last path
    for number, sample in enumerate(samples):
        depth = sample.shared if trail else 0
        while trail and trail[-1].start >= depth:
            trail.pop()
        if trail and trail[-1].end > depth:
            trail[-1] = _split(trail[-1], depth, roots)
        parent = trail[-1] if trail else None
        leaf = Node(depth, sample.num_inputs + 1, number, parent)
        (roots if parent is None else parent.children).append(leaf)
        trail.append(leaf)
        for node in trail:
            node.num_paths += 1
            node.passes.add(sample.micro_batch)
    nodes = _number(roots)
    for node in reversed(nodes):
        node.tokens_below += node.num_tokens
        if node.parent is not None:
            node.parent.tokens_below += node.tokens_below
            node.parent.num_below += 1 + node.num_below
    return nodes


def _split(node: Node, depth: int, roots: list[Node]) -> Node:
    """Cut a node in two at `depth`. Return the upper part, which takes its place."""
    upper = Node(node.start, depth, node.first_path, node.parent, [node], num_paths=node.num_paths)
    upper.passes = set(node.passes)
    siblings = roots if node.parent is None else node.parent.children
    siblings[siblings.index(node)] = upper
    node.start, node.parent = depth, upper
    return upper


def _number(roots: Sequence[Node]) -> list[Node]:
    nodes: list[Node] = []
    waiting = list(reversed(roots))
    while waiting:
        node = waiting.pop()
        node.number = len(nodes)
        nodes.append(node)
        waiting += reversed(node.children)
    return nodes


def mark_targets(
    nodes: Sequence[Node], samples: Sequence[RecordedSample], reasons: NDArray[np.uint8], first: Sequence[int]
) -> None:
    """Mark in each node the tokens that were targets, and those that at least one path learnt.

    Args:
        reasons: [N] `TokenReason` of the targets of all samples.
        first: [S + 1] where the targets of each sample begin.
    """
    places = _places(samples)
    marks = np.where(reasons <= TokenReason.CAPPED, np.uint8(LEARNT), np.uint8(UNLEARNT))
    for leaf, number in _leaves(nodes):
        of_sample = slice(first[number], first[number + 1])
        own, at = marks[of_sample], places[of_sample]
        node: Node | None = leaf
        while node is not None:
            low, high = at.searchsorted((node.start, node.end)).tolist()
            if low < high:
                if node.marks is None:
                    node.marks = np.zeros(node.num_tokens, dtype=np.uint8)
                inside = at[low:high] - node.start
                node.marks[inside] = np.maximum(node.marks[inside], own[low:high])
            node = node.parent


def _places(samples: Sequence[RecordedSample]) -> NDArray[np.int64]:
    """The places of the targets of all samples, one sample after the other."""
    spans = np.asarray([span for sample in samples for span in sample.spans], dtype=np.int64).reshape(-1, 2)
    counts = spans[:, 1] - spans[:, 0]
    return np.repeat(spans[:, 0] - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(counts.sum())


def _runs(marks: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
    return [(start, end, int(marks[start])) for start, end in itertools.pairwise(edges) if marks[start]]


def _leaves(nodes: Sequence[Node]) -> list[tuple[Node, int]]:
    """The node where each path ends, and the number of the path."""
    leaves = [(node, node.first_path) for node in nodes if not node.children]
    assert len(leaves) == sum(node.num_paths for node in nodes if node.parent is None), "every path has a leaf"
    return leaves


def count_computed(samples: Sequence[RecordedSample]) -> int:
    """Count the tokens that the forward passes of a step computed: in each pass, what its samples share once."""
    shared = np.asarray([sample.shared for sample in samples], dtype=np.int64)
    by_pass: dict[int, list[int]] = {}
    for number, sample in enumerate(samples):
        by_pass.setdefault(sample.micro_batch, []).append(number)
    total = sum(sample.num_inputs for sample in samples)
    for numbers in by_pass.values():
        # Two paths share the minimum of what the neighbours between them share.
        total -= int(np.minimum.reduceat(np.append(shared, 0), np.asarray(numbers) + 1)[:-1].sum())
    return total


def choose_nodes(nodes: Sequence[Node], top: Node | None, *, depth: int | None, limit: int) -> list[Node]:
    """Choose at most `limit` nodes of the subtree of `top` (`None`: of the tree), those with most tokens below first.

    Returns:
        The nodes in depth-first order. The node above a chosen one is chosen too, unless it is above `top`.
    """
    roots = [node for node in nodes if node.parent is None] if top is None else [top]
    waiting = [(-root.tokens_below, root.number, 1) for root in roots]
    heapq.heapify(waiting)
    chosen: list[int] = []
    while waiting and len(chosen) < limit:
        _, number, level = heapq.heappop(waiting)
        chosen.append(number)
        if depth is None or level < depth:
            for child in nodes[number].children:
                heapq.heappush(waiting, (-child.tokens_below, child.number, level + 1))
    return [nodes[number] for number in sorted(chosen)]
