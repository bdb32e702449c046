"""What is asked of a machine that SkyPilot rents, whose login shell may print something of its own first."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from art.backends.skypilot.sky_server import SkyServer
from art.backends.ssh.ssh import Ssh
from art.errors import UnreachableError
from tests.support.fake_sky import FakeSky

GREETINGS = ["", "printf 'Welcome! '", "echo Welcome; echo 'Maintenance on Sunday' >&2"]


@pytest.fixture
def folder(sky: FakeSky) -> Path:
    """The server's folder on the machine."""
    sky.machine.server_folder.mkdir(parents=True)
    return sky.machine.server_folder


@pytest.mark.parametrize("greeting", GREETINGS)
async def test_the_watch_is_read_and_told_its_end_after_a_greeting(sky: FakeSky, folder: Path, greeting: str) -> None:
    server = SkyServer(Ssh("box"))
    sky.machine.set_shell(greeting)
    assert await server.watched() is None
    began = int(time.time())
    (folder / "watch.json").write_text(json.dumps({"last_active_at": began - 1000, "ended": None}))
    watched = await server.watched()
    assert watched is not None
    assert 1000 <= watched.idle_s <= 1001 + time.time() - began
    await server.set_end(2.0)
    ends_at = json.loads((folder / "limit.json").read_text())["ends_at"]
    assert began + 7200 <= ends_at <= time.time() + 7200


async def test_a_watch_that_is_no_json_is_told(folder: Path) -> None:
    (folder / "watch.json").write_text("half")
    with pytest.raises(UnreachableError, match="answered about its watch with 'half'"):
        await SkyServer(Ssh("box")).watched()
