"""Which sequences of a decode group read the keys of a common prefix together: what `shared_prefix` plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """F prefixes, and the queries that see all of one each; each prefix has room for the same number of queries."""

    rows: Tensor  # [F] a row that begins with the prefix
    num_keys: int
    """Length of the longest prefix."""
    mask: Tensor | None  # [F, 1, 1, num_keys], 0 or -inf, where lengths differ
    queries: Tensor  # [F * room] index of the query in each place, any in an empty one
    places: Tensor  # [n] place of each query


@dataclass(frozen=True, slots=True)
class Sharing:
    """The sequences of a decode group that share prefixes."""

    members: Ints  # [n] indices into the group, ascending
    lengths: Ints  # [n] length of the prefix of each
    keys: SharedKeys  # with the members as queries
