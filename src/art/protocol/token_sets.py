"""Sets of token ids as short text, for frames and databases.

A set may hold half the vocabulary, and an answer has a set per token. Ids ascend, so they are written as differences,
which are small where a set is large: a set of 10 takes about 60 characters, one of 70,000 about 60,000.
"""

from __future__ import annotations

import base64
import operator
import sys
import zlib
from array import array
from itertools import accumulate, chain, islice

_LEVEL = 1
"""How hard zlib tries. Level 9 saves a tenth and takes ten times as long."""


def pack_token_sets(sets: list[list[int]]) -> str:
    """Encode sets, each ascending: their sizes, then their differences, compressed, as base64.

    Example: [[3, 5], []] is the compressed form of 2, 2, 0, 3, 2.
    """
    steps = (chain(ids[:1], map(operator.sub, islice(ids, 1, None), ids)) for ids in sets)
    numbers = array("i", [len(sets), *map(len, sets), *chain.from_iterable(steps)])
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(zlib.compress(numbers.tobytes(), _LEVEL)).decode("ascii")


def unpack_token_sets(text: str) -> list[list[int]]:
    """Decode what `pack_token_sets` made.

    Raises:
        ValueError: `text` is something else.
    """
    numbers = array("i")
    try:
        numbers.frombytes(zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(f"token sets cannot be decoded: {error}") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    num_sets = numbers[0] if numbers else -1
    sizes = numbers[1 : 1 + max(num_sets, 0)]
    if num_sets < 0 or len(sizes) != num_sets or len(numbers) != 1 + num_sets + sum(sizes) or min(sizes, default=0) < 0:
        raise ValueError(f"token sets cannot be decoded: {len(numbers)} numbers do not fit {num_sets} sets")
    steps = iter(numbers[1 + num_sets :])
    return [list(accumulate(islice(steps, size))) for size in sizes]
