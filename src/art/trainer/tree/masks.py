"""Parts of the vocabulary that tokens were drawn from. This module does not need torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEW = 4096
"""Most tokens that a mask lists by id. This number of ids takes as much memory as the bits of 131,072 tokens."""


@dataclass(frozen=True, slots=True)
class VocabularyMask:
    """The tokens that could be drawn at one place. Equal masks compare equal, so that a dictionary finds duplicates.

    Example: tokens 1 and 9 of a vocabulary of 12
        few tokens are listed   data = 1, 9 as int32
        many are bits           data = 0b00000010, 0b00000010    bit v % 8 of byte v // 8 is token v
    """

    size: int
    """Number of tokens that could be drawn."""
    vocab_size: int
    data: bytes
    """Ids if `size` is at most `FEW`, else bits."""

    @classmethod
    def from_ids(cls, ids: NDArray[np.int32], vocab_size: int) -> VocabularyMask:
        """`ids` are ascending, without duplicates, and below `vocab_size`."""
        if len(ids) <= FEW:
            return cls(len(ids), vocab_size, ids.tobytes())
        return cls(len(ids), vocab_size, _pack(ids, vocab_size).tobytes())

    @classmethod
    def from_bits(cls, bits: bytes, vocab_size: int) -> VocabularyMask:
        """`bits` may be longer than the vocabulary, e.g. whole words."""
        flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little", count=vocab_size)
        size = int(np.count_nonzero(flags))
        if size <= FEW:
            return cls(size, vocab_size, np.flatnonzero(flags).astype(np.int32).tobytes())
        return cls(size, vocab_size, np.packbits(flags, bitorder="little").tobytes())

    @property
    def is_few(self) -> bool:
        return self.size <= FEW

    @property
    def ids(self) -> NDArray[np.int32]:
        """[size] Ascending ids of few tokens."""
        return np.frombuffer(self.data, dtype=np.int32)

    @property
    def bits(self) -> NDArray[np.uint8]:
        """[ceil(vocab_size / 8)]"""
        return _pack(self.ids, self.vocab_size) if self.is_few else np.frombuffer(self.data, dtype=np.uint8)

    def among(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids that are part of the mask, in the same order."""
        if self.is_few:
            own = self.ids
            is_part = own[np.searchsorted(own, ids).clip(max=len(own) - 1)] == ids if len(own) else ids < 0
        else:
            is_part = (self.bits[ids >> 3] >> (ids & 7)) & 1 == 1
        part: NDArray[np.int32] = ids[is_part]
        return part

    def __contains__(self, token_id: int) -> bool:
        return len(self.among(np.asarray([token_id], dtype=np.int32))) == 1


def _pack(ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.uint8]:
    flags = np.zeros(vocab_size, dtype=np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little")
