"""Usage and quotas over HTTP, with the commands that print and set them."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from art.cli import operator
from art.client.client import ServerClient
from art.errors import ConfigError, InvalidRequestError, PermissionDeniedError, QuotaError
from art.protocol.usage_report import Quota, UsageReport
from art.record.recorder import create_tables
from art.record.usage_book import Amounts, UsageBook
from art.server.answers import failure
from art.server.app import App
from art.storage.database import Database
from art.storage.keys import KeyStore


class Server:
    def __init__(self, folder: Path, book: UsageBook) -> None:
        self.book, self.keys = book, KeyStore(folder / "keys.db")
        self.app = App(SimpleNamespace(usage=book), api_key="operator", keys=self.keys)  # type: ignore[arg-type]

    def client(self, key: str = "operator") -> ServerClient:
        return ServerClient("http://localhost", key, transport=httpx2.ASGITransport(self.app))

    def key(self, project: str | None) -> str:
        return self.keys.create("somebody", project=project, scopes=["infer", "train", "admin"])[1]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    database = Database(tmp_path / "art.db")
    await database.run(create_tables)
    book = UsageBook(database, now=lambda: 1_768_478_400.0)  # 2026-01-15
    book.add("search", "agent", Amounts(prompt=1_000, cached=400, completion=200, steps=3, sampling_s=1_800, usd=1.5))
    book.add("shop", "agent", Amounts(prompt=10, training_s=900))
    server = Server(tmp_path, book)
    yield server
    server.keys.close()
    database.close()


async def test_the_operator_sees_all_projects_and_a_project_sees_its_own(server: Server) -> None:
    async with server.client() as client:
        assert [one.project for one in (await client.usage()).projects] == ["search", "shop"]
        assert [one.project for one in (await client.usage(project="shop")).projects] == ["shop"]
        assert (await client.usage(month="2025-12")).projects == []
        for month in ("2026-13", "january", "2026-1", "../etc"):
            with pytest.raises(InvalidRequestError, match="such as 2026-01"):
                await client.usage(month=month)
    async with server.client(server.key("shop")) as client:
        assert [one.project for one in (await client.usage()).projects] == ["shop"]
        with pytest.raises(PermissionDeniedError):
            await client.usage(project="search")


async def test_only_the_operator_sets_quotas(server: Server) -> None:
    async with server.client(server.key("search")) as client:
        with pytest.raises(PermissionDeniedError, match="quotas are set by the operator"):
            await client.set_quota("search", Quota())
    async with server.client(server.key(None)) as client:
        report = await client.set_quota("search", Quota(tokens=1_000))
        assert report.projects[0].quota == Quota(tokens=1_000)
        await client.set_quota(None, Quota(usd=5))
        assert (await client.usage()).default_quota == Quota(usd=5)
    async with server.client(server.key("shop")) as client:
        report = await client.usage()
        assert (report.default_quota, report.projects[0].quota) == (None, Quota(usd=5))
    with pytest.raises(QuotaError) as refused:
        server.book.check_sampling("search")
    answer = failure(refused.value)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in answer.headers
    assert b'"code":"quota_exceeded"' in answer.body


def quota(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    operator.add_quota_options(parser)
    return parser.parse_args(words)


async def test_the_table_of_usage(server: Server) -> None:
    await server.book.set_quota("search", Quota(tokens=2_400, device_s=3_600))
    text = operator.describe_usage(await server.book.report(None, None), with_models=True)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == [
        "project prompt tokens cached sampled steps device hours USD quota",
        "search 1,000 400 200 3 0.50 1.50 50% of 2,400 tokens, 50% of 1.00 device hours",
        "agent 1,000 400 200 3 0.50 1.50",
        "shop 10 0 0 0 0.25 0.00 none",
        "agent 10 0 0 0 0.25 0.00",
        "total 1,010 400 200 3 0.75 1.50",
        "Usage of 2026-01; quotas reset on 2026-02-01 00:00 UTC.",
    ]


async def test_usage_for_programs(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = await server.book.report(None, None)
    monkeypatch.setattr(operator, "ask_server", lambda url, ask: report)
    parser = argparse.ArgumentParser()
    operator.add_usage_options(parser)
    assert operator.run_usage(parser.parse_args(["--json", str(tmp_path / "usage.json")])) == 0
    assert UsageReport.model_validate_json((tmp_path / "usage.json").read_text()) == report


def test_what_the_commands_ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str | None, Quota]] = []
    answer = SimpleNamespace(default_quota=None)

    class Client:
        def set_quota(self, project: str | None, quota: Quota) -> SimpleNamespace:
            asked.append((project, quota))
            return answer

    ask_server = operator.ask_server
    monkeypatch.setattr(operator, "ask_server", lambda url, ask: ask(Client()))
    for words, said in [
        (
            ("set", "search", "--tokens", "5000", "--device-hours", "2"),
            "search may use 5,000 tokens, 2.00 device hours",
        ),
        (("set", "--every-project", "--usd", "9.5"), "Every project without a quota of its own may use 9.50 USD"),
        (("clear", "search"), "search may use any amount"),
    ]:
        assert operator.run_quota(quota(*words)) == 0
        assert capsys.readouterr().out == f"{said} a month\n"
    assert asked == [("search", Quota(tokens=5000, device_s=7200)), (None, Quota(usd=9.5)), ("search", Quota())]
    answer.default_quota = Quota(steps=7)
    assert operator.run_quota(quota("clear", "search")) == 0
    like = "search, like every project without a quota of its own, may use 7 steps a month\n"
    assert capsys.readouterr().out == like
    for words, problem in [
        (("set", "search"), "at least one limit"),
        (("set", "--steps", "3"), "name one project"),
        (("clear", "search", "--every-project"), "name one project"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            operator.run_quota(quota(*words))
    monkeypatch.delenv("ART_SERVER_URL", raising=False)
    with pytest.raises(ConfigError, match="--url or ART_SERVER_URL"):
        ask_server(None, lambda client: client.usage())
