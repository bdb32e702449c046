"""The prefix tree of a step, built from the index of its token file, with counts, texts and rollouts for the page.

The index lists the paths in the depth-first order of the tree, and how much each shares with the one before it:

    lengths    5  4  3        shared    0  3  2
    nodes      [0, 2) all     [2, 3) of the first two     [3, 5) [3, 4) [2, 3) of one each

A path ends with its last target, which no forward pass had as input, so it is not shared with others.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from art.errors import NotFoundError
from art.gateway.tokenizer import Tokenizer
from art.storage.step_files import PlanRecord, RecordedSample, TokenFile, TokenReason
from art_page.databases import ReadOnlyDatabase
from art_page.rollout_answers import RolloutKey, TreeAnswer, TreeNode, TreeQuery
from art_page.token_paths import read_exchanges, token_texts

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
            # The new path leaves the last one inside of this node: its upper part takes its place.
            node = trail[-1]
            upper = Node(node.start, depth, node.first_path, node.parent, [node], num_paths=node.num_paths)
            upper.passes = set(node.passes)
            siblings = roots if node.parent is None else node.parent.children
            siblings[siblings.index(node)] = upper
            node.start, node.parent, trail[-1] = depth, upper, upper
        parent = trail[-1] if trail else None
        leaf = Node(depth, sample.num_inputs + 1, number, parent)
        (roots if parent is None else parent.children).append(leaf)
        trail.append(leaf)
        for node in trail:
            node.num_paths += 1
            node.passes.add(sample.micro_batch)
    nodes: list[Node] = []
    waiting = list(reversed(roots))
    while waiting:
        node = waiting.pop()
        node.number = len(nodes)
        nodes.append(node)
        waiting += reversed(node.children)
    for node in reversed(nodes):
        node.tokens_below += node.num_tokens
        if node.parent is not None:
            node.parent.tokens_below += node.tokens_below
            node.parent.num_below += 1 + node.num_below
    return nodes


def mark_targets(
    nodes: Sequence[Node], samples: Sequence[RecordedSample], reasons: NDArray[np.uint8], first: Sequence[int]
) -> None:
    """Mark in each node the tokens that were targets, and those that at least one path learnt.

    Args:
        reasons: [N] `TokenReason` of the targets of all samples.
        first: [S + 1] where the targets of each sample begin.
    """
    # The places of the targets of all samples, one sample after the other.
    spans = np.asarray([span for sample in samples for span in sample.spans], dtype=np.int64).reshape(-1, 2)
    counts = spans[:, 1] - spans[:, 0]
    places = np.repeat(spans[:, 0] - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(counts.sum())
    marks = np.where(reasons <= TokenReason.CAPPED, np.uint8(LEARNT), np.uint8(UNLEARNT))
    for leaf in (node for node in nodes if not node.children):  # a path ends in each
        of_sample = slice(first[leaf.first_path], first[leaf.first_path + 1])
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


def _runs(marks: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
    return [(start, end, int(marks[start])) for start, end in pairwise(edges) if marks[start]]


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


def choose_nodes(nodes: Sequence[Node], top: Node | None, limit: int) -> list[Node]:
    """Choose at most `limit` nodes of the subtree of `top` (`None`: of the tree), those with most tokens below first.

    Returns:
        The nodes in depth-first order. The node above a chosen one is chosen too, unless it is above `top`.
    """
    roots = [node for node in nodes if node.parent is None] if top is None else [top]
    waiting = [(-root.tokens_below, root.number) for root in roots]
    heapq.heapify(waiting)
    chosen: list[int] = []
    while waiting and len(chosen) < limit:
        _, number = heapq.heappop(waiting)
        chosen.append(number)
        for child in nodes[number].children:
            heapq.heappush(waiting, (-child.tokens_below, child.number))
    return [nodes[number] for number in sorted(chosen)]


_MAX_TEXT = 200
_TEXT_TOKENS = 100
"""Tokens of which the text of a node is made. It is cut to 200 characters."""
_MAX_ROLLOUTS = 5
_PATH = re.compile(r"^(?P<rollout>.*)\.paths\[(?P<path>\d+)\](?:\.observations)?$")


@dataclass(slots=True)
class StepTree:
    """The whole tree of a step, which is built once for all queries about it."""

    plan: PlanRecord
    samples: list[RecordedSample]
    nodes: list[Node]
    num_computed: int
    num_trained: int

    @classmethod
    def build(cls, file: TokenFile, plan: PlanRecord) -> StepTree:
        """Build the tree of the step that `file` and `plan` are of.

        Raises:
            StorageError: the file is gone or damaged.
        """
        samples = [sample for sample in file.samples if not sample.is_refused]
        reasons = file.read_all(["reasons"])["reasons"]
        nodes = build_nodes(samples)
        first = [0, *accumulate(sample.num_targets for sample in samples)]
        mark_targets(nodes, samples, reasons, first)
        return cls(plan, samples, nodes, count_computed(samples), int((reasons <= TokenReason.CAPPED).sum()))


def describe_tree(
    tree: StepTree,
    query: TreeQuery,
    *,
    database: ReadOnlyDatabase,
    tokenizer: Tokenizer | None,
    rollouts: Mapping[str, RolloutKey],
) -> TreeAnswer:
    """Describe a tree, or a part of it.

    Args:
        rollouts: where rollouts are in the index, by their first exchange.

    Raises:
        NotFoundError: the tree has no such node.
    """
    plan, samples, nodes = tree.plan, tree.samples, tree.nodes
    if query.node is not None and query.node >= len(nodes):
        raise NotFoundError(f"the tree of step {plan.step} has {len(nodes)} nodes, no node {query.node}", param="node")
    top = None if query.node is None else nodes[query.node]
    chosen = choose_nodes(nodes, top, query.limit)
    hidden = {node.number: node.num_below for node in chosen}  # less those that are chosen themselves
    for node in chosen:
        above = node.parent
        while above is not None and above.number in hidden:
            hidden[above.number] -= 1
            above = above.parent
    planned = {rollout.label: rollout.exchange_ids for group in plan.groups for rollout in group.rollouts}
    texts = _texts(chosen, samples, planned, database, tokenizer)
    missing = None
    if tokenizer is None:
        missing = "The tokenizer of the base model is not on this machine, so the nodes have no texts."
    elif len(texts) < len(chosen):
        missing = "Some exchanges of the step are not recorded any more, or never were, so their nodes have no texts."
    described = []
    for node in chosen:
        keys: list[RolloutKey] = []  # where the first rollouts through the node were logged
        for sample in samples[node.first_path : node.first_path + node.num_paths]:
            ids = chain.from_iterable(planned.get(sample.rollout_id, []))
            key = next((rollouts[one] for one in ids if one in rollouts), None)
            keys += [key] if key is not None and key not in keys else []
            if len(keys) == _MAX_ROLLOUTS:
                break
        num_learnt, num_masked = node.count(LEARNT), node.count(UNLEARNT)
        described_node = TreeNode(
            id=node.number, parent=None if node.parent is None or node is top else node.parent.number, start=node.start,
            num_tokens=node.num_tokens, num_paths=node.num_paths, num_learnt=num_learnt, num_masked=num_masked,
            num_passes=len(node.passes), kind="learnt" if num_learnt else "masked" if num_masked else "context",
            runs=[(start, end, mark == LEARNT) for start, end, mark in node.runs()], first_path=node.first_path,
            text=texts.get(node.number), num_hidden=hidden[node.number],
            rollouts=keys,
        )  # fmt: skip
        described.append(described_node)
    return TreeAnswer(
        step=plan.step, num_tokens=sum(node.num_tokens for node in nodes), num_computed=tree.num_computed,
        num_path_tokens=sum(sample.num_inputs + 1 for sample in samples), num_trained=tree.num_trained,
        num_paths=len(samples), num_nodes=len(nodes),
        above=[] if top is None else [node.number for node in top.above()], nodes=described, missing=missing,
    )  # fmt: skip


def _texts(
    nodes: Sequence[Node],
    samples: Sequence[RecordedSample],
    planned: Mapping[str, Sequence[Sequence[str]]],
    database: ReadOnlyDatabase,
    tokenizer: Tokenizer | None,
) -> dict[int, str]:
    """The beginning of the text of each node, by number; nothing for nodes whose exchanges are not recorded.

    Args:
        planned: exchanges of each path of each rollout, by the rollout's label.
    """
    if tokenizer is None:
        return {}
    last: dict[int, str] = {}  # the last exchange of the first path through each node, which has all of its tokens
    for node in nodes:
        match = _PATH.match(samples[node.first_path].sample_id)
        paths = planned.get(match["rollout"], []) if match is not None else []
        if match is not None and int(match["path"]) < len(paths) and paths[int(match["path"])]:
            last[node.number] = paths[int(match["path"])][-1]
    recorded, texts = read_exchanges(database, last.values()), {}
    for node in nodes:
        if (exchange := recorded.get(last.get(node.number, ""))) is not None:
            tokens = np.concatenate([exchange.prompt_token_ids, exchange.completion_token_ids])
            beginning = tokens[node.start : min(node.end, node.start + _TEXT_TOKENS)]
            texts[node.number] = "".join(token_texts(tokenizer, beginning.tolist()))[:_MAX_TEXT]
    return texts


def no_tree(step: int, why: str) -> TreeAnswer:
    """The answer where a step has no token file."""
    return TreeAnswer(
        step=step, num_tokens=0, num_computed=0, num_path_tokens=0, num_trained=0, num_paths=0, num_nodes=0, nodes=[],
        missing=why,
    )  # fmt: skip
