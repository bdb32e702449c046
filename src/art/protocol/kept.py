"""Compact form of kept tokens: the ids that each token of an answer was drawn from, see `samples.Constraint.kept`.

Ids are ascending, so their differences are small numbers. These are compressed, after the number of ids of each token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def pack_kept(kept: Sequence[Sequence[int]]) -> bytes:
    """Pack the ids of each token."""
    import numpy as np

    counts = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))
    ids = np.fromiter((token_id for ids in kept for token_id in ids), dtype=np.int64, count=int(counts.sum()))
    steps = np.diff(ids, prepend=0)
    starts = (np.cumsum(counts) - counts)[counts > 0]
    steps[starts] = ids[starts]  # the first id of a token follows no other
    return zlib.compress(np.concatenate([[len(kept)], counts, steps]).astype("<i4").tobytes(), level=1)


def unpack_kept(packed: bytes) -> list[list[int]]:
    """The ids of each token, from the result of `pack_kept`.

    Raises:
        ValueError: `packed` is no such result.
    """
    import numpy as np

    try:
        numbers = np.frombuffer(zlib.decompress(packed), dtype="<i4").astype(np.int64)
    except zlib.error as error:
        raise ValueError(f"packed tokens cannot be read: {error}") from error
    num_tokens = int(numbers[0]) if len(numbers) else -1
    counts, steps = numbers[1 : 1 + num_tokens], numbers[1 + num_tokens :]
    if num_tokens < 0 or len(counts) != num_tokens or counts.min(initial=0) < 0 or counts.sum() != len(steps):
        raise ValueError(f"packed tokens are damaged: they hold {len(numbers)} numbers")
    ends = np.cumsum(counts)
    total = np.cumsum(steps)
    starts = ends - counts
    before = np.where(starts > 0, total[np.maximum(starts, 1) - 1] if len(total) else 0, 0)
    ids = (total - np.repeat(before, counts)).tolist()
    return [ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
