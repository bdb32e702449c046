"""No name leads out of the data directory: every parameter of every route, as it is and percent-encoded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from art.config import ServerConfig
from art.errors import InvalidRequestError
from art.protocol.training import RegisterRequest
from art.runtime.runtime import Runtime
from art.server.app import App
from art.server.call import Route
from art.storage.layout import DataDir
from tests.support.page import ALL_ROUTES
from tests.support.spies import TwoProjects

BAD = [
    "..", ".", "...", "../../etc/passwd", "..\\..\\x", "a/../..", "~", "~root", "-rf", ".hidden", "a..b", "a b", "a\tb",
    "a\nb", "a\0b", "é", "a" * 129, "C:", "con:", "%2e%2e", "a%2fb", "\ufffd", "*", "$HOME", "`id`", "a;b", "a?b", "a#b",
]  # fmt: skip
GOOD = {
    "project": "games",
    "name": "agent",
    "job_id": "job-12345",
    "rollout_id": "r1",
    "step": "3",
    "split": "train",
    "group": "0",
    "index": "0",
    "version": "0",
    "folder": "lib",
    "key_id": "k",
    "format": "peft",
    "file": "f",
    "response_id": "resp_00063f1a2b3c4d5e6f708192a3b4",
}
PARAMETERS = [(route, name) for route in ALL_ROUTES for name in re.findall(r"{(\w+)}", route.path)]


async def ask(app: Any, method: str, raw_path: str) -> int:
    """The status of a request whose path is sent as it is here, unlike clients do."""
    from urllib.parse import unquote

    scope = {
        "type": "http", "method": method, "raw_path": raw_path.encode(), "path": unquote(raw_path), "query_string": b"",
        "headers": [(b"authorization", b"Bearer k"), (b"host", b"localhost")], "scheme": "http",
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("route", "parameter"),
    PARAMETERS,
    ids=lambda value: value if isinstance(value, str) else f"{value.method} {value.path}",
)
async def test_bad_names_in_the_url(route: Route, parameter: str) -> None:
    runtime = TwoProjects()
    app = App(runtime, api_key="k")  # type: ignore[arg-type]
    for bad in BAD:
        for encoded in (quote(bad, safe=""), quote(bad, safe="/"), "".join(f"%{byte:02X}" for byte in bad.encode())):
            values = {name: quote(value) for name, value in GOOD.items()} | {parameter: encoded}
            path = re.sub(r"{(\w+)}", lambda match, values=values: values[match[1]], route.path)
            status = await ask(app, route.method, path)
            assert status in (400, 404, 405), (bad, path)
    spies = [*runtime.parts(), runtime.gateway, runtime.gateway.rollouts]
    assert [spy.calls for spy in spies] == [[]] * len(spies)


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


@pytest.mark.parametrize("name", BAD)
async def test_bad_names_in_a_body(name: str, tmp_path: Path) -> None:
    runtime = Runtime(tmp_path / "data", ServerConfig())
    await runtime.start()
    before = files(tmp_path)
    for project, model in ((name, "agent"), ("games", name)):
        with pytest.raises(InvalidRequestError):
            await runtime.registration.register(RegisterRequest(project=project, name=model, base_model="org/base"))
        with pytest.raises(InvalidRequestError):
            DataDir(tmp_path).model(project, model)
    assert files(tmp_path) == before
    await runtime.close()
