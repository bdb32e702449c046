"""The prefix tree of a step for the page: nodes with counts, texts and rollouts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from art.errors import NotFoundError
from art.gateway.format.tokenizer import Tokenizer
from art.gateway.record.recorded_answers import RecordedAnswer
from art.storage.steps.plan_record import PlanRecord
from art.storage.steps.token_file import RecordedSample, TokenFile, TokenReason
from art.viewer.answers.rollout_rows import RolloutKey
from art.viewer.answers.tree import TreeAnswer, TreeNode, TreeQuery
from art.viewer.database import ReadOnlyDatabase
from art.viewer.tokens.exchanges import read_exchanges
from art.viewer.tokens.nodes import LEARNT, UNLEARNT, Node, build_nodes, choose_nodes, count_computed, mark_targets
from art.viewer.tokens.texts import token_texts

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
        first = [0, *itertools.accumulate(sample.num_targets for sample in samples)]
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
    chosen = choose_nodes(nodes, top, depth=query.depth, limit=query.limit)
    exchanges = _Exchanges(samples, plan)
    texts = exchanges.texts(chosen, database, tokenizer)
    hidden = _count_hidden(chosen)
    return TreeAnswer(
        step=plan.step,
        num_tokens=sum(node.num_tokens for node in nodes),
        num_computed=tree.num_computed,
        num_path_tokens=sum(sample.num_inputs + 1 for sample in samples),
        num_trained=tree.num_trained,
        num_paths=len(samples),
        num_nodes=len(nodes),
        above=[] if top is None else [node.number for node in top.above()],
        nodes=[
            _describe(node, top, texts.get(node.number), hidden[node.number], exchanges.rollouts(node, rollouts))
            for node in chosen
        ],
        missing=_missing(tokenizer, texts, chosen),
    )


def _describe(node: Node, top: Node | None, text: str | None, num_hidden: int, rollouts: list[RolloutKey]) -> TreeNode:
    num_learnt, num_masked = node.count(LEARNT), node.count(UNLEARNT)
    return TreeNode(
        id=node.number,
        parent=None if node.parent is None or node is top else node.parent.number,
        start=node.start,
        num_tokens=node.num_tokens,
        num_paths=node.num_paths,
        num_learnt=num_learnt,
        num_masked=num_masked,
        num_passes=len(node.passes),
        kind="learnt" if num_learnt else "masked" if num_masked else "context",
        runs=[(start, end, mark == LEARNT) for start, end, mark in node.runs()],
        first_path=node.first_path,
        text=text,
        num_hidden=num_hidden,
        rollouts=rollouts,
    )


def no_tree(step: int, why: str) -> TreeAnswer:
    """The answer where a step has no token file."""
    return TreeAnswer(
        step=step, num_tokens=0, num_computed=0, num_path_tokens=0, num_trained=0, num_paths=0, num_nodes=0, nodes=[],
        missing=why,
    )  # fmt: skip


class _Exchanges:
    """Finds the exchanges (recorded requests and answers) of the paths of a tree."""

    def __init__(self, samples: Sequence[RecordedSample], plan: PlanRecord) -> None:
        planned = {rollout.label: rollout.exchange_ids for group in plan.groups for rollout in group.rollouts}
        self._of_path: list[list[str]] = []
        self._of_rollout = [
            list(itertools.chain.from_iterable(planned.get(sample.rollout_id, []))) for sample in samples
        ]
        for sample in samples:
            match = _PATH.match(sample.sample_id)
            ids = planned.get(match["rollout"], []) if match is not None else []
            self._of_path.append(ids[int(match["path"])] if match is not None and int(match["path"]) < len(ids) else [])

    def texts(self, nodes: Sequence[Node], database: ReadOnlyDatabase, tokenizer: Tokenizer | None) -> dict[int, str]:
        """The beginning of the text of each node, by number; nothing for nodes whose exchanges are not recorded."""
        if tokenizer is None:
            return {}
        last = {node.number: self._of_path[node.first_path][-1:] for node in nodes}
        recorded = read_exchanges(database, itertools.chain.from_iterable(last.values()))
        texts = {}
        for node in nodes:
            for exchange_id in last[node.number]:
                if (exchange := recorded.get(exchange_id)) is not None:
                    texts[node.number] = _text(exchange, node, tokenizer)
        return texts

    def rollouts(self, node: Node, keys: Mapping[str, RolloutKey]) -> list[RolloutKey]:
        """Where the first rollouts through a node were logged."""
        rollouts: list[RolloutKey] = []
        for path in range(node.first_path, node.first_path + node.num_paths):
            key = next((keys[one] for one in self._of_rollout[path] if one in keys), None)
            if key is not None and key not in rollouts:
                rollouts.append(key)
            if len(rollouts) == _MAX_ROLLOUTS:
                break
        return rollouts


def _text(exchange: RecordedAnswer, node: Node, tokenizer: Tokenizer) -> str:
    end = min(node.end, node.start + _TEXT_TOKENS)
    prompt = exchange.prompt_token_ids
    tokens = [*prompt[node.start : end].tolist()]
    size = len(prompt)
    if end > size:
        tokens += exchange.completion_token_ids[max(0, node.start - size) : end - size].tolist()
    return "".join(token_texts(tokenizer, tokens))[:_MAX_TEXT]


def _count_hidden(chosen: Sequence[Node]) -> dict[int, int]:
    """How many nodes below each chosen one are not chosen."""
    hidden = {node.number: node.num_below for node in chosen}
    for node in chosen:
        above = node.parent
        while above is not None and above.number in hidden:
            hidden[above.number] -= 1
            above = above.parent
    return hidden


def _missing(tokenizer: Tokenizer | None, texts: Mapping[int, str], chosen: Sequence[Node]) -> str | None:
    if tokenizer is None:
        return "The tokenizer of the base model is not on this machine, so the nodes have no texts."
    if len(texts) < len(chosen):
        return "Some exchanges of the step are not recorded any more, or never were, so their nodes have no texts."
    return None
