from __future__ import annotations

import os

# Before torch is imported: passive waiting, so that test processes do not fight for the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path

import pytest

from art.engines.torch.embedded import TorchEngine
from tests.support.engine import load, make_model, write_adapter


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models; each test module fills in what it needs."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def qwen3(models: Path) -> Path:
    return make_model(models / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def adapters(models: Path, qwen3: Path) -> tuple[Path, Path]:
    """Two adapters of different ranks for `qwen3`."""
    return (
        write_adapter(models / "adapter-a", qwen3, seed=1),
        write_adapter(
            models / "adapter-b", qwen3, seed=2, rank=6, alpha=3.0, modules=("q_proj", "v_proj", "down_proj")
        ),
    )


@pytest.fixture
def engine(qwen3: Path) -> TorchEngine:
    return load(qwen3)
