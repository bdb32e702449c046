from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

import art
from art.testing.tiny.build import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers yes, no or maybe, about equally often."""
    return Path(build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", task="yes_no_maybe", seed=0))


@pytest.fixture(scope="session")
def shared_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[art.LocalBackend]:
    """One server for the files that only sample, train and ask, each with models in a project of its own.

    A file that kills, fills, moves or attacks its server takes `backend`.
    """
    backend = art.LocalBackend(path=tmp_path_factory.mktemp("shared"))
    yield backend
    asyncio.run(backend.close())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[art.LocalBackend]:
    async with art.LocalBackend(path=tmp_path_factory.mktemp("data")) as backend:
        yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(backend: art.LocalBackend, tiny_model: Path, request: pytest.FixtureRequest) -> art.TrainableModel:
    project = getattr(request.module, "PROJECT", "tests")
    model = art.TrainableModel(name="agent", project=project, base_model=str(tiny_model))
    await model.register(backend)
    return model
