from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

import art


@pytest.fixture(scope="session")
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of Python modules that this process finds, as it finds those beside a script."""
    folder = tmp_path_factory.mktemp("modules")
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def shared_backend(tmp_path_factory: pytest.TempPathFactory, own_modules: Path) -> Iterator[art.LocalBackend]:
    """One server for the files that only sample, train and ask, each with models in a project of its own.

    Its trainer finds `own_modules`. A file that kills, fills, moves or attacks its server takes `backend`.
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
