"""A server's page over a scripted reader, asked as a browser asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx2

from art.config import ServerConfig
from art.server.app import App
from art.storage.keys import KeyStore
from art.storage.labels import LabelChanges, RunLabels
from art_page.page import TrainingPage
from art_page.run_answers import CostsAnswer, CostsByStep, RunDetail, RunList, RunSummary
from tests.support.spies import TwoProjects

OPERATOR = "operator-key-of-the-test"
ALL_ROUTES = App(cast(Any, TwoProjects()), api_key=OPERATOR, pages=[TrainingPage]).routes
"""The routes of a server with its page."""


def summary(project: str, base_model: str = "/usr/share/models/qwen") -> RunSummary:
    return RunSummary(
        headline=None, project=project, name="agent", base_model=base_model, state="idle", step=3, num_rollouts=8, reward=None,
        spark=None, main_metric=None, seconds_per_step=None, costs_usd=None, findings=[], updated_at=None, started_at=None,
    )  # fmt: skip


class ScriptedViewer:
    """Knows the runs a/agent and b/agent."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.tag = "1"

    def version(self, project: str | None = None, name: str | None = None) -> str:
        return self.tag

    def runs(self, project: str | None = None) -> RunList:
        self.asked.append(("runs", project))
        return RunList(runs=[summary(one) for one in ("a", "b") if project in (None, one)], now=1.0)

    def run(self, project: str, name: str) -> RunDetail:
        self.asked.append(("run", project, name))
        return RunDetail(
            **summary(project).model_dump(), splits=[], metrics=[], settings={"note": float("nan")}, all_findings=[],
            jobs=[],
        )  # fmt: skip

    def label(self, project: str, name: str, changes: LabelChanges) -> RunLabels:
        return RunLabels(**changes.model_dump(exclude_none=True))

    def costs(self, project: str, name: str) -> CostsAnswer:
        return CostsAnswer(total_usd=float("inf"), by_source=[], by_step=CostsByStep(steps=[], by_source={}))

    def close(self) -> None:
        self.asked.append("closed")


class Browser:
    """An application of two projects, and clients that keep cookies."""

    def __init__(self, folder: Path, config: ServerConfig, *, has_server: bool = True) -> None:
        self.viewer = ScriptedViewer()
        self.keys = KeyStore(folder / "keys.db")
        self.runtime = TwoProjects()
        runtime: Any = self.runtime if has_server else None
        self.app = App(
            runtime, api_key=OPERATOR, config=config, keys=self.keys, data_dir=folder, pages=[TrainingPage]
        )  # fmt: skip
        self.app.pages[0].__dict__["viewer"] = self.viewer

    def client(self, url: str = "http://localhost:5000") -> httpx2.AsyncClient:
        """A browser at this address, whose requests come from the page."""
        headers = {"origin": url, "x-art-page": "1", "sec-fetch-site": "same-origin"}
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url=url, headers=headers)

    async def logged_in(self, key: str, url: str = "http://localhost:5000") -> httpx2.AsyncClient:
        http = self.client(url)
        response = await http.post("/view/login", json={"key": key})
        assert response.status_code == 200, response.text
        return http


@contextmanager
def open_browser(folder: Path, *, has_server: bool = True, **settings: Any) -> Iterator[Browser]:
    browser = Browser(folder, ServerConfig(**settings), has_server=has_server)
    try:
        yield browser
    finally:
        browser.app.close()
        browser.keys.close()
