"""Every route, with every kind of key that must not open it. A new route is covered by being in the table."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from art.config import DistillConfig, TrainConfig
from art.gateway.anthropic import CountTokensRequest, MessagesRequest
from art.gateway.responses import ResponsesRequest
from art.protocol.chat_completions import ChatBody
from art.protocol.checkpoint_calls import ExportRequest, ForkRequest, LogRequest, MetricsRow, PullRequest, PushRequest
from art.protocol.keys import Empty
from art.protocol.promotions import PromoteRequest
from art.protocol.rollouts import RolloutUpdate
from art.protocol.training import (
    DeleteCheckpointsRequest,
    ExchangeIds,
    PreflightRequest,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)
from art.protocol.usage_report import QuotaRequest
from art.server.app import App
from art.server.call import Route
from art.storage.keys import KeyStore
from art.storage.labels import LabelChanges
from tests.support.page import ALL_ROUTES
from tests.support.spies import SECRET, TwoProjects, named_projects

OF_B = {
    "project": "b",
    "name": "agent",
    "job_id": "job-of-b",
    "rollout_id": "r1",
    "step": "0",
    "split": "train",
    "group": "0",
    "index": "0",
    "version": "0",
    "folder": "lib",
    "format": "peft",
    "file": "state.json",
    "comparison": "one",
}
"""Path parameters that name something of project b. Of rollouts, which have no owner, two projects may use one id."""
OF_A = OF_B | {"project": "a", "job_id": "job-of-a"}
BODIES: dict[type[Any], list[dict[str, Any]]] = {
    ChatBody: [
        {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        for model in ("b/agent", "b/agent@0", "b/none")
    ],
    ResponsesRequest: [{"model": model, "input": "hi"} for model in ("b/agent", "b/none")],
    MessagesRequest: [{"model": "b/agent", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}],
    CountTokensRequest: [{"model": "b/agent", "messages": [{"role": "user", "content": "hi"}]}],
    RegisterRequest: [{"project": "b", "name": "agent", "base_model": "base"}],
    TrainRequest: [
        {"job_id": "job-of-b", "groups": []},
        {
            "job_id": "job-of-a",
            "groups": [],
            "config": TrainConfig(loss=DistillConfig(teacher="b/agent")).model_dump(mode="json"),
        },
    ],
    TrainSFTRequest: [{"job_id": "job-of-b", "trajectories": []}],
    PreflightRequest: [{}],
    DeleteCheckpointsRequest: [{"keep_steps": []}],
    ForkRequest: [
        {"job_id": "job-of-a", "from_name": "agent", "from_project": "b"},
        {"job_id": "job-of-a", "from_name": "agent"},
    ],
    PullRequest: [
        {"job_id": "job-of-a", "source": {"bucket": "x"}, "from_name": "agent", "from_project": "b"},
        {"job_id": "job-of-a", "source": {"bucket": "x"}},
    ],
    ExportRequest: [{"job_id": "job-of-a", "format": "peft"}],
    PushRequest: [{"job_id": "job-of-a", "target": {"kind": "s3", "bucket": "x"}}],
    MetricsRow: [{"row_id": "row-0001", "step": 1, "metrics": {}}],
    Empty: [{}],
    PromoteRequest: [{"step": 0, "gate": {"require": 0.0}}],
    QuotaRequest: [{"project": "b", "quota": {"tokens": 1}}, {"project": None, "quota": {}}],
    ExchangeIds: [{"exchange_ids": ["ex_of_b"]}],
    LogRequest: [{"split": "train", "step": 1, "row": {"recorded_at": "x"}, "groups": []}],
    LabelChanges: [{"star": True}],
    RolloutUpdate: [{"project": "b", "reward": 1.0}, {"model": "b/agent"}, {"reward": 1.0}],
}
"""Bodies that name something of project b, where a body can. A new wire type needs an entry."""

GUARDED = [route for route in ALL_ROUTES if route.scope is not None]
each_route = pytest.mark.parametrize("route", GUARDED, ids=lambda route: f"{route.method} {route.path}")


class Setup:
    def __init__(self, path: Path) -> None:
        self.runtime = TwoProjects()
        self.store = KeyStore(path / "keys.db")
        app = App(self.runtime, api_key="operator", keys=self.store)  # type: ignore[arg-type]
        self.http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost", verify=False)

    async def ask(
        self, route: Route, key: str | None, *, of: dict[str, str] = OF_B, body: Any = None, query: str = ""
    ) -> httpx2.Response:
        path = re.sub(r"{(\w+)}", lambda match: of[match[1]], route.path)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.http.request(route.method, path + query, json=body, headers=headers)

    def reached(self) -> list[Any]:
        """Calls that did something, or read something of another project."""
        looked_up = [("status", ("a", "agent"), {})]
        gateway = self.runtime.gateway
        spies = [*self.runtime.parts(), gateway, gateway.rollouts]
        return [call for spy in spies for call in spy.calls if call not in looked_up]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    opened = Setup(tmp_path_factory.mktemp("keys"))
    yield opened
    opened.store.close()


@pytest.fixture
def setup(opened: Setup) -> Setup:
    opened.runtime.reset()
    return opened


@each_route
async def test_a_key_that_opens_nothing(setup: Setup, route: Route) -> None:
    revoked, revoked_text = setup.store.create("old", project=None, scopes=["admin"])
    setup.store.revoke(revoked.id)
    _, expired_text = setup.store.create("late", project=None, scopes=["admin"], expires_at=time.time() + 60)
    setup.store._now = lambda: time.time() + 61
    right = setup.store.create("right", project=None, scopes=["admin"])[1]
    almost = right[:-1] + ("A" if right[-1] != "A" else "B")
    try:
        for key in (None, "", "hunter2", "operato", "operator2", almost, right.upper(), revoked_text, expired_text):
            response = await setup.ask(route, key)
            assert response.status_code == 401, key
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert key in (None, "") or key not in response.text
    finally:
        setup.store._now = time.time
    assert setup.reached() == []


@each_route
async def test_a_key_of_another_scope(setup: Setup, route: Route) -> None:
    assert route.scope is not None
    for scope in {"infer", "train"} - {route.scope}:
        _, key = setup.store.create("narrow", project=None, scopes=[scope])  # type: ignore[list-item]
        response = await setup.ask(route, key)
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "permission_denied"
    assert setup.reached() == []


@each_route
async def test_a_key_of_another_project(setup: Setup, route: Route) -> None:
    _, key = setup.store.create("a's", project="a", scopes=["infer", "train", "admin"])
    in_url = {"project", "job_id", "response_id"} & set(re.findall(r"{(\w+)}", route.path))
    for body in BODIES[route.request] if route.request else [None]:
        for of in (OF_B, OF_A):
            response = await setup.ask(route, key, of=of, body=body)
            assert SECRET not in response.text
            if (in_url and of is OF_B) or (route.request is not None and "b" in _named(body)):
                assert response.status_code in (403, 404), response.text
    if "project" in route.query:
        response = await setup.ask(route, key, query="?project=b")
        assert response.status_code == 403
    for method, args, _ in setup.runtime.gateway.rollouts.calls:
        assert "a" in named_projects(args), f"`rollouts.{method}` was called for all projects"
    assert setup.runtime.gateway.calls == []


def _named(body: Any) -> set[str]:
    """Projects that a body names."""
    teacher = (body.get("config") or {}).get("loss", {}).get("teacher", "")
    return {
        body.get("project"),
        body.get("from_project"),
        (body.get("model") or "").split("/")[0],
        teacher.split("/")[0],
    }


OPEN = [route for route in ALL_ROUTES if route.scope is None and route.method == "GET"]


@pytest.mark.parametrize("route", OPEN, ids=lambda route: route.path)
async def test_an_open_route_tells_nothing(setup: Setup, route: Route) -> None:
    _, key = setup.store.create("a's", project="a", scopes=["infer", "train", "admin"])
    for given in (None, "wrong", key):
        response = await setup.ask(route, given)
        assert response.status_code == (503 if route.path == "/ready" else 404 if "{" in route.path else 200)
        assert SECRET not in response.text


async def test_a_key_of_the_project_opens_it(setup: Setup) -> None:
    _, key = setup.store.create("a's", project="a", scopes=["infer"])
    headers = {"authorization": f"Bearer {key}"}
    chat = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
    assert (await setup.http.get("/api/models/a/agent", headers=headers)).status_code == 200
    assert (await setup.http.get("/api/jobs/job-of-a", headers=headers)).status_code == 200
    assert (await setup.http.get("/health", headers=headers)).json() == {"status": "ok"}
    # A bare name is the project's own, however many projects have one of that name.
    assert (await setup.http.post("/v1/chat/completions", json=chat, headers=headers)).status_code == 200
    ((method, (request,), _),) = setup.runtime.gateway.calls
    assert (method, request.model) == ("complete", "a/agent")
    models = (await setup.http.get("/v1/models", headers=headers)).json()["data"]
    assert [model["id"] for model in models] == ["a/agent"]
    # Clients of Anthropic send the key under another name.
    assert (await setup.http.get("/v1/models", headers={"x-api-key": key})).status_code == 200


async def test_the_project_in_the_url_decides_for_a_key_that_may_do_everything(setup: Setup) -> None:
    headers = {"authorization": "Bearer operator"}
    for project, asked, meant in [
        ("a", "agent", "a/agent"),
        ("b", "agent", "b/agent"),
        ("b", "a/agent", "a/agent"),
        ("b", "other", "other"),
    ]:
        setup.runtime.reset()
        chat = {"model": asked, "messages": [{"role": "user", "content": "hi"}]}
        path = f"/projects/{project}/v1/chat/completions"
        assert (await setup.http.post(path, json=chat, headers=headers)).status_code == 200
        ((_, (request,), _),) = setup.runtime.gateway.calls
        assert request.model == meant


async def test_a_revoked_key_ends_at_once_in_a_running_server(setup: Setup, tmp_path: Path) -> None:
    elsewhere = KeyStore(setup.store._database.path)  # as `art keys` in another process
    key, text = elsewhere.create("short", project=None, scopes=["infer"])
    headers = {"authorization": f"Bearer {text}"}
    assert (await setup.http.get("/v1/models", headers=headers)).status_code == 200
    elsewhere.revoke(key.id)
    response = await setup.http.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert "revoked" in response.text
    elsewhere.close()


@pytest.mark.parametrize("path", ["comparisons", "comparisons/one"])
async def test_comparisons_of_models_are_for_keys_of_all_projects(setup: Setup, path: str) -> None:
    _, key = setup.store.create("a's", project="a", scopes=["infer", "train", "admin"])
    route = next(route for route in ALL_ROUTES if route.path == f"/view/api/{path}".replace("one", "{comparison}"))
    response = await setup.ask(route, key)
    assert response.status_code == 403
    assert "models of several projects" in response.json()["error"]["message"]
