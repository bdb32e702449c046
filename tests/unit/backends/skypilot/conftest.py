from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.backends.skypilot import cluster
from tests.support.fake_sky import FakeSky
from tests.support.fake_ssh import FakeMachine


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSky]:
    """SkyPilot's program on PATH, and the machine that it rents behind a fake ssh."""
    machine = FakeMachine(tmp_path / "machine")
    monkeypatch.setenv("PATH", f"{machine.bin_dir}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ART_LAUNCHED_DIR", str(tmp_path / "launched"))
    monkeypatch.delenv("ART_SKY", raising=False)
    monkeypatch.setattr(cluster, "RETRY_DELAY_S", 0.01)
    yield FakeSky(machine)
    machine.kill()
