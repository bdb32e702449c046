"""Only keys with scope `admin` learn where files lie on the machine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from art.errors import ConfigError, ProcessError
from art.gateway.completion import ChatStream
from art.protocol.training import JobStatus, ModelStatus, WireError
from art.server.app import App
from art.server.state import HiddenPaths
from art.storage.keys import KeyStore
from tests.support.spies import TwoProjects

GONE = "/usr/share/models/qwen"
CHAT = {"model": "a/agent", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{root}/a/models/agent/checkpoints/0004", "a/models/agent/checkpoints/0004"),
        ("no manifest in {root}/a/x.json, or in '{root}'", "no manifest in a/x.json, or in 'data_dir'"),
        ("{root}x/y is another folder", "y is another folder"),
        ("cannot read /usr/lib/python3.11/os.py:12", "cannot read os.py:12"),
        ('File "/home/bob/my-models/qwen", line 3', 'File "qwen", line 3'),
        ("file:///home/bob/x and /home/bob/x/ too", "x and x too"),
        ("there is no route GET /api/models/a/b; see http://host/home/bob", None),
        ("1/2 of a/b, and/or ./usr/x", None),
    ],
)
def test_paths_in_a_text(tmp_path: Path, text: str, shown: str | None) -> None:
    text = text.replace("{root}", str(tmp_path))
    assert HiddenPaths(tmp_path).hide(text) == (text if shown is None else shown)


class Runtime(TwoProjects):
    """Everything of project a names files."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        folder = root / "a/models/agent/checkpoints/0004"
        status = JobStatus(
            job_id="job-of-a", kind="train", project="a", name="agent", state="failed", checkpoint_path=str(folder),
            result={"path": str(folder)}, error=WireError(code="x", message=f"no space in {folder}"),
            findings=[f"see {GONE}"],
        )  # fmt: skip
        model = ModelStatus(project="a", name="agent", base_model=GONE, step=0, inference_name="a/agent")

        async def chunks() -> AsyncGenerator[dict[str, Any], None]:
            yield {"choices": [{"delta": {"content": "it is in /usr/share"}}]}
            raise ProcessError(f"the engine died; see {root}/logs/engine.log")

        async def stream(*args: Any, **options: Any) -> ChatStream:
            return ChatStream(num_prompt_tokens=1, chunks=chunks())

        self.jobs.status = self.jobs.wait = self.jobs.cancel = returning(status)  # type: ignore[method-assign,assignment]
        self.jobs.find = returning([status])  # type: ignore[method-assign]
        self.models.list_all = lambda: [model]  # type: ignore[method-assign]
        self.models.status = returning(model)  # type: ignore[method-assign]
        self.training.train_sft = returning(status)
        self.training.preflight = raising(ConfigError(f"no chat template in {GONE}, see {root}/logs"))
        self.checkpoints.list_all = returning([])
        self.gateway.complete = returning({"choices": [{"message": {"content": "it is in /usr/share"}}]})
        self.gateway.stream = stream

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "hosts": [{"base_model": GONE}]}

    async def obstacles(self) -> dict[str, str]:
        return {"database": f"cannot write {self.root}/art.db"}


def returning(value: Any) -> Any:
    async def answer(*args: Any, **options: Any) -> Any:
        return value

    return answer


def raising(error: Exception) -> Any:
    async def answer(*args: Any, **options: Any) -> Any:
        raise error

    return answer


REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/api/jobs", None),
    ("GET", "/api/jobs/job-of-a", None),
    ("POST", "/api/jobs/job-of-a/cancel", None),
    ("GET", "/v1/models", None),
    ("GET", "/api/models/a/agent", None),
    ("POST", "/api/models/a/agent/train_sft", {"job_id": "job-of-a", "trajectories": []}),
    ("POST", "/api/models/a/agent/preflight", {}),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
]


async def ask(root: Path, path: str, method: str, body: Any, scopes: list[Any], project: str | None = "a") -> str:
    store = KeyStore(root / "keys.db")
    try:
        _, key = store.create("k", project=project, scopes=scopes)
        app = App(Runtime(root), api_key="operator", keys=store, data_dir=root)  # type: ignore[arg-type]
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as http:
            return (await http.request(method, path, json=body, headers={"authorization": f"Bearer {key}"})).text
    finally:
        store.close()


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
async def test_a_key_of_a_project_sees_no_absolute_path(tmp_path: Path, method: str, path: str, body: Any) -> None:
    shown = await ask(tmp_path, path, method, body, ["infer", "train"])
    assert str(tmp_path) not in shown
    assert GONE not in shown
    whole = await ask(tmp_path, path, method, body, ["admin"])
    assert str(tmp_path) in whole or GONE in whole


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_operators_see_paths_in_health_and_readiness(tmp_path: Path, path: str) -> None:
    shown = await ask(tmp_path, path, "GET", None, ["infer"], project=None)
    assert "qwen" in shown or "art.db" in shown
    assert str(tmp_path) not in shown
    assert GONE not in shown
    assert "/" in await ask(tmp_path, path, "GET", None, ["admin"], project=None)


async def test_answers_of_a_model_stay_as_they_are(tmp_path: Path) -> None:
    shown = await ask(tmp_path, "/v1/chat/completions", "POST", CHAT, ["infer"])
    assert json.loads(shown)["choices"][0]["message"]["content"] == "it is in /usr/share"
    streamed = await ask(tmp_path, "/v1/chat/completions", "POST", CHAT | {"stream": True}, ["infer"])
    assert "it is in /usr/share" in streamed
