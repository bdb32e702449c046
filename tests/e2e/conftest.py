from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import art
from art.testing.tiny.build import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers yes, no or maybe, about equally often."""
    return Path(build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", task="yes_no_maybe", seed=0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[art.LocalBackend]:
    async with art.LocalBackend(path=tmp_path_factory.mktemp("data")) as backend:
        yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(backend: art.LocalBackend, tiny_model: Path) -> art.TrainableModel:
    model = art.TrainableModel(name="agent", project="tests", base_model=str(tiny_model))
    await model.register(backend)
    return model
