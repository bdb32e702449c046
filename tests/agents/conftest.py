"""A scripted model behind a real socket, the engine that runs containers, and the images of the agents."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from art.errors import ConfigError
from art_agents.containers import ContainerEngine
from art_agents.harness import AGENTS, Harness, find_harness
from tests.clients.model import open_scripted_bench
from tests.support.served_app import ServedApp, serve_app

BASE = os.environ.get("ART_AGENTS_BASE", "debian:12-slim")
"""Image below all others. Where registries have a certificate of their own, name an image that has it."""


def why_not() -> str | None:
    """Why no container can run here."""
    try:
        engine = ContainerEngine.find()
    except ConfigError as error:
        return str(error)
    asked = subprocess.run([engine.program, "image", "inspect", BASE], capture_output=True, check=False)
    return f"{engine.program} has no image {BASE}: `{engine.program} pull {BASE}`" if asked.returncode else None


REASON = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and "containers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            if REASON is not None:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def containers() -> ContainerEngine:
    return ContainerEngine.find()


@pytest.fixture(params=AGENTS)
def harness(request: pytest.FixtureRequest) -> Harness:
    return find_harness(request.param)


_images: dict[str, str] = {}


async def image_of(containers: ContainerEngine, harness: Harness) -> str:
    """The agent on the base image. It is built once; installing takes one to three minutes."""
    if harness.name not in _images:
        text = harness.dockerfile(BASE) + "WORKDIR /app\n"
        _images[harness.name] = await containers.build_layer(text, timeout_s=900)
    return _images[harness.name]


@pytest.fixture
async def served(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[ServedApp]:
    """The real application behind a real socket, over a scripted model."""
    async with serve_app(tmp_path, tokenizer_dir, open_scripted_bench) as opened:
        yield opened
