from __future__ import annotations

from pathlib import Path

import pytest

from art.testing.tiny.build import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers yes, no or maybe, about equally often."""
    return Path(build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", task="yes_no_maybe", seed=0))
