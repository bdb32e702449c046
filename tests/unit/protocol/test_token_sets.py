"""Token sets as text."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.protocol.compact import pack_token_sets, unpack_token_sets


@given(st.lists(st.sets(st.integers(0, 300_000), max_size=50).map(sorted), max_size=10))
def test_sets_come_back_as_they_were(sets: list[list[int]]) -> None:
    assert unpack_token_sets(pack_token_sets(sets)) == sets


def test_sets_are_short() -> None:
    assert len(pack_token_sets([list(range(7, 70_000, 7))])) < 1_000
    assert len(pack_token_sets([[5, 17, 20_000, 151_000]] * 1_000)) < 1_000


@pytest.mark.parametrize("text", ["", "?", "AAAA", base64.b64encode(zlib.compress(b"\x05\0\0\0")).decode()])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        unpack_token_sets(text)
