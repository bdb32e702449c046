"""Lay out token paths so that shared prefixes are there once. Paths are added one by one, and only new tokens are kept.

The paths are kept in a tree of runs. An added path is compared with the one before it first: neighbours in a request
are turns of one conversation, which share most of their tokens, so the walk from the root is short.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from art.protocol.compact.token_paths import TokenArray, TokenLayout, TokenPath

_NONE = np.zeros(0, dtype=np.uint32)


class _Node:
    """A run of tokens that all paths through it share."""

    __slots__ = ("children", "paths", "tokens")

    def __init__(self, tokens: TokenArray) -> None:
        self.tokens = tokens
        self.children: dict[int, _Node] = {}  # by first token
        self.paths: list[int] = []  # numbers of the paths whose inputs end with this run

    def split(self, size: int) -> _Node:
        """Cut off the first `size` tokens as a node of their own, above this one."""
        upper = _Node(self.tokens[:size])
        self.tokens = self.tokens[size:]
        upper.children[int(self.tokens[0])] = self
        return upper


class LayoutBuilder:
    """Takes the token paths of a step one by one, and makes their `TokenLayout`."""

    def __init__(self) -> None:
        self._root = _Node(_NONE)
        self._names: list[str] = []
        self._rests: list[TokenArray] = []
        self._last = _NONE
        self._trail: list[tuple[int, _Node]] = [(0, self._root)]
        """The nodes of the last path, each after the depth at which it begins."""

    def add(self, token_ids: TokenArray, num_inputs: int, name: str) -> None:
        """Add a path.

        Args:
            num_inputs: number of leading tokens that are sorted and shared.
            name: decides the order of equal paths.
        """
        inputs, number = token_ids[:num_inputs], len(self._names)
        self._names.append(name)
        self._rests.append(token_ids[num_inputs:].copy())
        depth = _num_shared(self._last, inputs)
        trail = self._trail
        while len(trail) > 1 and trail[-1][0] >= depth:
            trail.pop()
        start, node = trail[-1]
        if start < depth < start + len(node.tokens):
            trail.pop()
            node = self._cut(trail, start, node, depth - start)
        while depth < num_inputs:
            child = node.children.get(int(inputs[depth]))
            if child is None:
                child = node.children[int(inputs[depth])] = _Node(inputs[depth:].copy())
                trail.append((depth, child))
                depth, node = num_inputs, child
                break
            size = _num_shared(child.tokens, inputs[depth:])
            if size < len(child.tokens):
                child = self._cut(trail, depth, child, size)
            else:
                trail.append((depth, child))
            depth, node = depth + size, child
        node.paths.append(number)
        self._last = inputs

    def _cut(self, trail: list[tuple[int, _Node]], start: int, node: _Node, size: int) -> _Node:
        """Split a node after `size` tokens. The upper part takes its place below the end of `trail`, and joins it."""
        parent = trail[-1][1]
        upper = node.split(size)
        parent.children[int(upper.tokens[0])] = upper
        trail.append((start, upper))
        return upper

    def build(self) -> list[TokenPath]:
        """Return the paths in the order in which they were added. All of them have one layout."""
        tokens: list[TokenArray] = []
        runs: list[tuple[int, int]] = []
        first_run, shared, num_inputs, numbers = [0], list[int](), list[int](), list[int]()
        size = low = 0
        # A place: a node, its depth, and the runs of the path up to it.
        places: list[tuple[_Node, int, tuple[tuple[int, int], ...]]] = [(self._root, 0, ())]
        while places:
            node, depth, above = places.pop()
            low = min(low, depth)
            end = size + len(node.tokens)
            if len(node.tokens):
                tokens.append(node.tokens)
                is_next = bool(above) and above[-1][1] == size
                above = (*above[:-1], (above[-1][0], end)) if is_next else (*above, (size, end))
            size, depth = end, depth + len(node.tokens)
            for number in sorted(node.paths, key=self._names.__getitem__):
                shared.append(low)
                runs += above
                first_run.append(len(runs))
                num_inputs.append(depth)
                numbers.append(number)
                low = depth
            places += [(child, depth, above) for _, child in sorted(node.children.items(), reverse=True)]
        rests = [self._rests[number] for number in numbers]
        layout = TokenLayout(
            tokens=np.concatenate([*tokens, _NONE]),
            runs=np.asarray(runs, dtype=np.int64).reshape(-1, 2),
            first_run=np.asarray(first_run, dtype=np.int64),
            shared=np.asarray(shared, dtype=np.int64),
            rests=np.concatenate([*rests, _NONE]),
            first_rest=np.cumsum([0, *map(len, rests)], dtype=np.int64),
            num_inputs=np.asarray(num_inputs, dtype=np.int64),
        )
        ranks = np.argsort(numbers).tolist()
        return [TokenPath(layout, rank) for rank in ranks]


def lay_out(paths: Iterable[tuple[TokenArray, int, str]]) -> list[TokenPath]:
    """Lay out paths, each given as the arguments of `LayoutBuilder.add`."""
    builder = LayoutBuilder()
    for token_ids, num_inputs, name in paths:
        builder.add(token_ids, num_inputs, name)
    return builder.build()


def _num_shared(first: TokenArray, second: TokenArray) -> int:
    """Number of equal leading tokens."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    place = int(differs.argmax()) if length else 0
    return place if length and differs[place] else length
