"""The prefix tree of a step as it was trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from art.viewer.answers.base import Answer, Query
from art.viewer.answers.rollout_rows import RolloutKey

MAX_NODES = 5000


class TreeQuery(Query):
    """Which part of the tree to return."""

    node: int | None = Field(default=None, ge=0)
    """The node whose subtree to return; null for the whole tree."""
    depth: int | None = Field(default=None, ge=1)
    """Levels of nodes below it."""
    limit: int = Field(default=1500, ge=1, le=MAX_NODES)
    """Most nodes to return. The widest are kept; the others are counted in `num_hidden` of the node above them."""


class TreeNode(Answer):
    """A run of tokens that the same paths go through."""

    id: int
    """Number of the node in the depth-first order of the whole tree. It stays the same for every query."""
    parent: int | None
    start: int
    """Place of its first token in the sequences that go through it."""
    num_tokens: int
    num_paths: int
    num_learnt: int
    """Tokens of the node that at least one path learnt."""
    num_masked: int
    """Tokens of the node that were to be trained, and that no path learnt."""
    num_passes: int
    """How often it was computed: forward passes of the step that held a path through it."""
    kind: Literal["learnt", "masked", "context"]
    runs: list[tuple[int, int, bool]] = []
    """Where the targets are: begin and end, as places in the sequences, and whether a path learnt these tokens. If not,
    they were masked, or the loss left them out. What lies between the runs is context."""
    first_path: int
    """Number of the first path through it, in the tree's order; the others follow."""
    text: str | None = None
    """The beginning of its text, at most 200 characters."""
    num_hidden: int = 0
    """Nodes below it that are not in this answer."""
    rollouts: list[RolloutKey] = []
    """At most five of the rollouts that go through it, where they were logged."""


class TreeAnswer(Answer):
    step: int
    num_tokens: int
    """Tokens of the tree, shared ones once."""
    num_computed: int
    """Tokens that the forward passes computed: a part that several passes need is computed in each."""
    num_path_tokens: int
    """Tokens of all paths, one after the other."""
    num_trained: int
    """Tokens that were learnt, counted on each path."""
    num_paths: int
    num_nodes: int
    above: list[int] = []
    """The nodes above the one that was asked for, from the root on."""
    nodes: list[TreeNode]
    """In depth-first order, parents first."""
    missing: str | None = None
