from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_sky import FakeSky
from tests.support.fake_ssh import FakeMachine


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSky]:
    """SkyPilot's program on PATH, and the machine that it rents behind a fake ssh."""
    machine = FakeMachine(tmp_path / "machine")
    monkeypatch.setenv("PATH", f"{machine.bin_dir}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ART_SKY", raising=False)
    yield FakeSky(machine)
    machine.kill()
