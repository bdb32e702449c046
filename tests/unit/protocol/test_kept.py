from __future__ import annotations

import random
import zlib

import pytest

from art.protocol.kept import pack_kept, unpack_kept


@pytest.mark.parametrize("kept", [[], [[]], [[], [], []], [[0]], [[5, 9], [], [1], [151_647], []]])
def test_kept_tokens_survive_packing(kept: list[list[int]]) -> None:
    assert unpack_kept(pack_kept(kept)) == kept


@pytest.mark.parametrize("seed", range(20))
def test_random_kept_tokens_survive_packing(seed: int) -> None:
    rng = random.Random(seed)
    kept = [sorted(rng.sample(range(2000), rng.choice([0, 1, 3, 50, 500]))) for _ in range(rng.randrange(12))]
    assert unpack_kept(pack_kept(kept)) == kept


def test_neighbours_take_little_room() -> None:
    assert len(pack_kept([list(range(100_000, 110_000))] * 10)) < 5_000


@pytest.mark.parametrize(
    "packed", [b"", b"nonsense", zlib.compress(b""), zlib.compress(b"\x05\0\0\0"), pack_kept([[1, 2]])[:-4]]
)
def test_damaged_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="packed tokens"):
        unpack_kept(packed)
