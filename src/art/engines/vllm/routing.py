"""Which replica a request goes to: the one that has computed most of its prompt already, unless that one is busy.

A later turn of a rollout begins with the tokens of the turn before, and all rollouts of a group begin alike. A replica
that has seen these tokens has them in its prefix cache. So each replica remembers the prompts that it was sent, as
hashes of their prefixes at whole blocks:

    prompt of 70 tokens, blocks of 32:  hash(tokens[:32])  hash(tokens[:64])
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from hashlib import blake2b

BLOCK = 32
"""Tokens; much shorter than a turn, so that little of a shared prefix is overlooked."""
MAX_REMEMBERED = 100_000
"""Prefixes per replica; the least recently used are forgotten, as its cache does."""
MAX_IMBALANCE = 1.25
"""A replica with more than this times the mean number of running requests, and more than `SLACK` on top, is busy."""
SLACK = 4
AVOID_S = 10.0


class Router:
    """Chooses among `count` replicas, by number."""

    def __init__(self, count: int) -> None:
        self._seen: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        self._avoid_until = [0.0] * count
        self.running = [0] * count
        """Requests under way per replica; kept by the caller."""

    def choose(self, adapter: str, token_ids: list[int]) -> int:
        """The replica for a prompt, which is taken to have computed it from now on."""
        if len(self._seen) == 1:
            return 0
        hashes = prefix_hashes(adapter, token_ids)
        limit = MAX_IMBALANCE * sum(self.running) / len(self.running) + SLACK
        now = time.monotonic()
        alive = [i for i, until in enumerate(self._avoid_until) if until <= now] or list(range(len(self.running)))
        free = [i for i in alive if self.running[i] <= limit] or alive
        chosen = min(free, key=lambda i: (-self._known(i, hashes), self.running[i]))
        self._remember(chosen, hashes)
        return chosen

    def avoid(self, replica: int) -> None:
        """It does not answer: leave it alone for a while, if there are others."""
        self._avoid_until[replica] = time.monotonic() + AVOID_S

    def forget(self, replica: int) -> None:
        """Its cache is gone."""
        self._seen[replica].clear()

    def _known(self, replica: int, hashes: list[bytes]) -> int:
        """Blocks at the beginning of the prompt that the replica has seen."""
        seen = self._seen[replica]
        return next((len(hashes) - i for i, digest in enumerate(reversed(hashes)) if digest in seen), 0)

    def _remember(self, replica: int, hashes: list[bytes]) -> None:
        seen = self._seen[replica]
        for digest in hashes:
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > MAX_REMEMBERED:
            seen.popitem(last=False)


def prefix_hashes(adapter: str, token_ids: list[int]) -> list[bytes]:
    """One hash per whole block, each of everything up to its end; weights of another adapter have another cache."""
    running = blake2b(adapter.encode(), digest_size=16)
    hashes = []
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        running.update(array("I", token_ids[end - BLOCK : end]).tobytes())
        hashes.append(running.digest())
    return hashes
