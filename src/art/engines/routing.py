"""The rule that chooses the copy of a model (replica) for a prompt: where most of it has been computed, and room is.

ART's server uses it for the engine processes of a base model, and the vLLM engine for the servers in its `urls`.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import OrderedDict
from collections.abc import Collection
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
    """Chooses the replica, numbered from 0, that has already computed most of a prompt, unless it is busy.

    A later turn of a rollout begins with the tokens of the previous turn, and all rollouts of a group begin with the
    same tokens. A replica that has computed these tokens has them in its prefix cache. So the router remembers which
    prompts it sent to which replica, as hashes of their prefixes at whole blocks:

        prompt of 70 tokens, blocks of 32:  hash(tokens[:32])  hash(tokens[:64])
    """

    def __init__(self, count: int) -> None:
        self._seen: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        self._avoid_until = [0.0] * count
        self.running = [0] * count
        """Number of running requests per replica. The caller updates it."""
        self.room = [math.inf] * count
        """Number of requests that each replica computes at once, where it is known. One that runs as many is busy."""

    def choose(self, adapter: str | None, token_ids: list[int], among: Collection[int] | None = None) -> int:
        """Choose the replica for a prompt, and remember that its prefix cache will hold the prompt.

        `among` are the replicas that may be chosen; by default all.
        """
        if len(self._seen) == 1:
            return 0
        hashes = prefix_hashes(adapter or "", token_ids)
        now = time.monotonic()
        allowed = range(len(self._seen)) if among is None else among
        alive = [i for i in allowed if self._avoid_until[i] <= now] or list(allowed)
        limit = MAX_IMBALANCE * sum(self.running[i] for i in alive) / len(alive) + SLACK
        free = [i for i in alive if self.running[i] <= limit]
        free = [i for i in free if self.running[i] < self.room[i]] or free

        def known(replica: int) -> int:
            """Number of blocks at the beginning of the prompt that the replica has computed."""
            seen = self._seen[replica]
            return next((len(hashes) - i for i, digest in enumerate(reversed(hashes)) if digest in seen), 0)

        chosen = min(free, key=lambda i: (-known(i), self.running[i]))
        seen = self._seen[chosen]
        for digest in hashes:
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > MAX_REMEMBERED:
            seen.popitem(last=False)
        return chosen

    def avoid(self, replica: int) -> None:
        """Send no requests to a replica for `AVOID_S` seconds after it failed to answer, if there are others."""
        self._avoid_until[replica] = time.monotonic() + AVOID_S

    def forget(self, replica: int) -> None:
        """Forget the prompts of a replica whose cache was emptied."""
        self._seen[replica].clear()


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
