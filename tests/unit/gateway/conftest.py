"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from art.gateway.tokenizer import Tokenizer
from tests.support.gateway import Bench, open_bench


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture
async def bench(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path, tokenizer_dir) as opened:
        yield opened
