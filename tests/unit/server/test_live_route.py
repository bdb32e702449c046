"""The stream of live events: of the caller's project, alive while nothing happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from art.server.app import App
from art.storage.keys import KeyStore
from tests.support.spies import SECRET, TwoProjects


async def stream(app: Any, key: str, *, pieces: int) -> tuple[int, str]:
    """Return the status and the first pieces of the body. The client hangs up after that number of pieces."""
    scope = {
        "type": "http", "method": "GET", "path": "/view/api/live", "raw_path": b"/view/api/live", "query_string": b"",
        "headers": [(b"authorization", b"Bearer " + key.encode())], "scheme": "http",
    }  # fmt: skip
    sent: list[Any] = []
    enough = asyncio.Event()

    async def receive() -> Any:
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > pieces or sent[0]["status"] != 200:
            enough.set()

    async with asyncio.timeout(60):
        await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


async def test_events_of_the_callers_project_only(tmp_path: Path) -> None:
    runtime, keys = TwoProjects(), KeyStore(tmp_path / "keys.db")
    app = App(runtime, api_key="operator", keys=keys, data_dir=tmp_path)  # type: ignore[arg-type]
    _, key = keys.create("a's", project="a", scopes=["infer"])
    status, text = await stream(app, key, pieces=2)
    assert status == 200
    assert text.startswith("retry: 1000\n\nid: 1\nevent: finding\ndata: {")
    assert SECRET not in text
    assert "/usr/share" not in text
    _, text = await stream(app, "operator", pieces=3)
    assert SECRET in text
    assert "/usr/share/x" in text
    assert runtime.live.calls == [("watch", ("a",), {}), ("watch", (None,), {})]
    keys.close()


async def test_silence_is_not_taken_for_a_broken_connection_and_a_revoked_key_ends_it(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    runtime = TwoProjects()
    runtime.live.goes_on = True
    app = App(runtime, api_key="operator", keys=keys)  # type: ignore[arg-type]
    made, key = keys.create("a's", project="a", scopes=["infer"])
    _, text = await stream(app, key, pieces=4)
    assert ": alive\n\n" in text
    asyncio.get_running_loop().call_later(0.1, keys.revoke, made.id)
    with pytest.raises(Exception, match="revoked"):  # the connection is closed in the middle of the answer
        await stream(app, key, pieces=100_000)
    keys.close()
