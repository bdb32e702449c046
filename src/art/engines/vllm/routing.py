"""Choose the replica for a request: the one that has already computed most of its prompt, unless that one is busy.

A later turn of a rollout begins with the tokens of the previous turn, and all rollouts of a group begin with the same
tokens. A replica that has computed these tokens has them in its prefix cache. So the router remembers which prompts it
sent to which replica, as hashes of their prefixes at whole blocks:

    prompt of 70 tokens, blocks of 32:  hash(tokens[:32])  hash(tokens[:64])
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from hashlib import blake2b

BLOCK = 32
"""Block length in tokens. It is much shorter than a turn, so that little of a shared prefix is missed."""
MAX_REMEMBERED = 100_000
"""Prefixes remembered per replica. The least recently used are forgotten first, as in the replica's cache."""
MAX_IMBALANCE = 1.25
"""A replica is busy when it runs more requests than this times the mean number per replica, plus `SLACK`."""
SLACK = 4
AVOID_S = 10.0
"""Seconds for which a replica that did not answer gets no requests, if there are others."""


class Router:
    """Chooses which of `count` vLLM servers (replicas, numbered from 0) computes a request."""

    def __init__(self, count: int) -> None:
        self._seen: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        self._avoid_until = [0.0] * count
        self.running = [0] * count
        """Number of running requests per replica. The caller updates it."""

    def choose(self, adapter: str, token_ids: list[int]) -> int:
        """Choose the replica for a prompt, and remember that its prefix cache will hold the prompt."""
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
        """Send no requests to a replica for `AVOID_S` seconds after it failed to answer, if there are others."""
        self._avoid_until[replica] = time.monotonic() + AVOID_S

    def forget(self, replica: int) -> None:
        """Forget the prompts of a replica whose cache was emptied."""
        self._seen[replica].clear()

    def _known(self, replica: int, hashes: list[bytes]) -> int:
        """Number of blocks at the beginning of the prompt that the replica has computed."""
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
    """Return one hash per whole block of `BLOCK` tokens: of the adapter and all tokens up to the end of the block.

    The adapter is hashed because each adapter has cache entries of its own.
    """
    running = blake2b(adapter.encode(), digest_size=16)
    hashes = []
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        running.update(array("I", token_ids[end - BLOCK : end]).tobytes())
        hashes.append(running.digest())
    return hashes
