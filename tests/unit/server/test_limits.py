"""What is refused with 429 and 400, and when it is taken again."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from art.config import LimitsConfig, ServerConfig
from art.errors import OverloadedError
from art.server.app import App
from art.server.auth import SERVER, Caller
from art.server.state import Limiter
from art.storage.keys import KeyStore
from tests.support.spies import TwoProjects

CI = Caller("ci", "games", frozenset({"infer"}))


def fill(limiter: Limiter, caller: Caller, *, samples: bool = False) -> int:
    """How many requests are let in at once, at most 50."""
    with ExitStack() as running:
        for number in range(50):
            try:
                running.enter_context(limiter.admit(caller, samples=samples))
            except OverloadedError:
                return number
    return 50


def test_requests_under_way() -> None:
    limiter = Limiter(LimitsConfig(max_requests=20, max_requests_per_key=7, max_chats_per_project=3))
    assert fill(limiter, CI) == 7
    assert fill(limiter, CI, samples=True) == 3
    assert fill(limiter, SERVER, samples=True) == 20  # the operator's key, up to what the server takes
    with limiter.admit(CI, samples=True):
        same_project = Caller("other", "games", frozenset({"infer"}))
        assert fill(limiter, same_project, samples=True) == 2
        assert fill(limiter, Caller("other", "chess", frozenset({"infer"})), samples=True) == 3
    assert limiter.running == 0
    assert set(limiter.num_refused) == {"max_requests", "max_requests_per_key", "max_chats_per_project"}


def test_a_failed_request_leaves_room() -> None:
    limiter = Limiter(LimitsConfig(max_requests=1))
    for _ in range(3):
        with pytest.raises(KeyError), limiter.admit(CI, samples=True):
            raise KeyError
    assert limiter.running == 0


def test_names_of_limits_are_settings() -> None:
    """Refusals tell which setting to raise."""
    for limit, caller in [("max_requests", SERVER), ("max_requests_per_key", CI), ("max_chats_per_project", CI)]:
        limiter = Limiter(LimitsConfig.model_validate({limit: 1}))
        with (
            limiter.admit(caller, samples=True),
            pytest.raises(OverloadedError, match=f"limits.{limit}`"),
            limiter.admit(caller, samples=True),
        ):
            pass
        assert limit in LimitsConfig.model_fields
    with pytest.raises(ValidationError):
        LimitsConfig.model_validate({"max_requests": 0})


async def test_429_says_when_to_come_back(tmp_path: Path) -> None:
    runtime, store = TwoProjects(), KeyStore(tmp_path / "keys.db")
    _, key = store.create("a's", project="a", scopes=["infer"])
    config = ServerConfig(limits=LimitsConfig(max_chats_per_project=1))
    app = App(runtime, api_key="operator", config=config, keys=store)  # type: ignore[arg-type]
    entered, leave = asyncio.Event(), asyncio.Event()

    async def complete(request: Any, **how: Any) -> dict[str, Any]:
        entered.set()
        await leave.wait()
        return {}

    runtime.gateway.complete = complete  # type: ignore[attr-defined]
    chat = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test", verify=False) as http:
        first = asyncio.create_task(http.post("/v1/chat/completions", json=chat, headers=headers))
        await entered.wait()
        refused = await http.post("/v1/chat/completions", json=chat, headers=headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        assert refused.headers["x-should-retry"] == "true"
        assert (await http.get("/v1/models", headers=headers)).status_code == 200  # only chats are counted
        leave.set()
        assert (await first).status_code == 200
        assert (await http.post("/v1/chat/completions", json=chat, headers=headers)).status_code == 200
    store.close()


@pytest.mark.parametrize("brackets", ["[]", "{}"])
async def test_deep_bodies(brackets: str) -> None:
    app = App(TwoProjects(), api_key="k")  # type: ignore[arg-type]

    def nested(depth: int) -> str:
        inside = "[" * depth + "]" * depth
        return inside if brackets == "[]" else inside.replace("[", '{"a":').replace("]", "}").replace(":}", ":1}")

    headers = {"authorization": "Bearer k"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test", verify=False) as http:
        for depth, told in [(64, False), (65, True), (900, True)]:
            body = nested(depth)
            json.loads(body)
            response = await http.post("/v1/chat/completions", content=body, headers=headers)
            assert response.status_code == 400
            assert ("inside one another" in response.text) is told


def test_by_default_a_greedy_project_leaves_room_for_others() -> None:
    limiter = Limiter(LimitsConfig())
    with ExitStack() as running:

        def flood() -> None:
            for number in range(10_000):
                caller = Caller(f"key-{number % 3}", "greedy", frozenset({"infer"}))
                running.enter_context(limiter.admit(caller, samples=True))

        with pytest.raises(OverloadedError, match="max_chats_per_project"):
            flood()
        for project in ("b", "c"):
            with limiter.admit(Caller(project, project, frozenset({"infer"})), samples=True):
                pass
