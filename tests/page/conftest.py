"""A browser, and a server with a real run of the tiny model. Both are left out where Playwright or Chromium is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import art
from tests.page.browser import Walker, open_walker
from tests.page.chromium import CHROMIUM
from tests.support import shop_run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shots", metavar="FOLDER", help="write a picture of each view into this folder")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(data_dir: Path) -> AsyncIterator[art.LocalBackend]:
    async with art.LocalBackend(path=data_dir) as backend:
        yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(backend: art.LocalBackend, tiny_model: Path) -> art.TrainableModel:
    """A model that was trained for a few steps."""
    model = art.TrainableModel(name=shop_run.NAME, project=shop_run.PROJECT, base_model=str(tiny_model))
    await model.register(backend)
    await shop_run.train(model)
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def walker(request: pytest.FixtureRequest) -> AsyncIterator[Walker]:
    pytest.importorskip("playwright.async_api", reason="`make test-page` installs Playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: install it, or name it in ART_CHROMIUM")
    shots = request.config.getoption("--shots")
    async with open_walker(CHROMIUM, Path(shots) if shots else None) as walker:
        yield walker
