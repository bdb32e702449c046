"""Usage and quotas over HTTP, with the commands that print and set them."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from art.cli import quota as quota_command
from art.cli import usage as usage_command
from art.client import ArtClient
from art.errors import ConfigError, InvalidRequestError, PermissionDeniedError, QuotaError
from art.gateway.record.tables import create_tables
from art.gateway.record.usage_book import Amounts, UsageBook
from art.protocol.keys import KeyScope
from art.protocol.organisation.usage_report import Quota, UsageReport
from art.server.app import App
from art.server.errors import failure
from art.storage.database import Database
from art.storage.keys import KeyStore


class Server:
    def __init__(self, folder: Path, book: UsageBook) -> None:
        self.book, self.keys = book, KeyStore(folder / "keys.db")
        self.app = App(SimpleNamespace(usage=book), api_key="operator", keys=self.keys)  # type: ignore[arg-type]

    def client(self, key: str = "operator") -> ArtClient:
        return ArtClient("http://localhost", key, transport=httpx2.ASGITransport(self.app))

    def key(self, project: str | None) -> str:
        return self.keys.create("somebody", project=project, scopes=["infer", "train", "admin"])[1]

    def add_by_keys(self) -> dict[str, tuple[str, str]]:
        """Count 1 token for the operator's key, 10, 100 and 1000 for three keys of `search` and one for all projects.

        Returns:
            Id and text of each key, by name.
        """
        keys: dict[str, tuple[str, str]] = {}
        scopes: dict[str, list[KeyScope]] = {"reader": ["infer"], "trainer": ["infer", "train"], "lead": ["admin"]}
        self.book.add("search", "agent", Amounts(completion=1), key_id="server")
        for power, (name, granted) in enumerate([*scopes.items(), ("ci", ["admin"])], start=1):
            key, text = self.keys.create(name, project=None if name == "ci" else "search", scopes=granted)
            keys[name] = key.id, text
            self.book.add("search", "agent", Amounts(completion=10**power), key_id=key.id)
        return keys


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    database = Database(tmp_path / "art.db")
    await database.run(create_tables)
    book = UsageBook(database, now=lambda: 1_768_478_400.0)  # 2026-01-15
    await book.start()
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


async def used_by(client: ArtClient) -> dict[tuple[str | None, str | None], int]:
    """Sampled tokens of `search` by id and name of the key."""
    async with client:
        (project,) = (await client.usage(project="search", keys=True)).projects
    assert project.keys is not None
    assert sum(one.completion for one in project.keys) == project.completion, "keys add up to the project"
    return {(one.key_id, one.name): one.completion for one in project.keys}


async def test_usage_by_key_for_keys_of_each_scope(server: Server) -> None:
    keys = server.add_by_keys()
    ids = {name: key_id for name, (key_id, _) in keys.items()}
    everything = {
        (None, None): 200, ("server", "operator"): 1, (ids["reader"], "reader"): 10, (ids["trainer"], "trainer"): 100,
        (ids["lead"], "lead"): 1_000, (ids["ci"], "ci"): 10_000,
    }  # fmt: skip
    for text in ("operator", keys["lead"][1], keys["ci"][1]):
        assert await used_by(server.client(text)) == everything
    total = sum(everything.values())
    for name, own in (("reader", 10), ("trainer", 100)):
        seen = await used_by(server.client(keys[name][1]))
        assert seen == {(ids[name], name): own, (None, "other keys"): total - own}
    async with server.client(server.key("shop")) as client:
        with pytest.raises(PermissionDeniedError):
            await client.usage(project="search", keys=True)
        (shop,) = (await client.usage(keys=True)).projects
        assert [(one.key_id, one.prompt) for one in shop.keys or ()] == [(None, 10)]


async def test_a_revoked_key_keeps_its_name_and_a_wrong_choice_is_refused(server: Server) -> None:
    keys = server.add_by_keys()
    server.keys.revoke(keys["reader"][0])
    assert (keys["reader"][0], "reader") in await used_by(server.client())
    async with server.client() as client:
        with pytest.raises(InvalidRequestError, match="`keys` must be true or false, got 'yes'"):
            await client.typed(UsageReport, "GET", "/api/usage", params={"keys": "yes"})
        assert [one.keys for one in (await client.usage()).projects] == [None, None]


def parsed(command: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(words)


async def test_the_table_of_usage(server: Server) -> None:
    await server.book.set_quota("search", Quota(tokens=2_400, device_s=3_600))
    text = usage_command.describe(await server.book.report(None, None), with_models=True)
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


async def test_the_table_of_keys(server: Server) -> None:
    keys = server.add_by_keys()
    lead = keys["lead"]
    async with server.client(lead[1]) as client:
        text = usage_command.describe(await client.usage(keys=True))
    rows = sorted(" ".join(line.split()) for line in text.splitlines() if line.startswith("  "))
    assert rows == sorted([
        "key not known 1,000 400 200 3 0.50 1.50", "operator (server) 0 0 1 0 0.00 0.00",
        *(f"{name} ({keys[name][0]}) 0 0 {count} 0 0.00 0.00" for name, count in
          [("reader", "10"), ("trainer", "100"), ("lead", "1,000"), ("ci", "10,000")]),
    ])  # fmt: skip
    async with server.client(keys["reader"][1]) as client:
        text = usage_command.describe(await client.usage(keys=True))
    assert "\n  other keys " in text


def test_what_the_commands_ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str | None, Quota]] = []
    answer = SimpleNamespace(default_quota=None)

    class Client:
        def set_quota(self, project: str | None, quota: Quota) -> SimpleNamespace:
            asked.append((project, quota))
            return answer

    monkeypatch.setattr(quota_command, "asked", lambda url, ask: ask(Client()))
    for words, said in [
        (
            ("set", "search", "--tokens", "5000", "--device-hours", "2"),
            "search may use 5,000 tokens, 2.00 device hours",
        ),
        (("set", "--every-project", "--usd", "9.5"), "Every project without a quota of its own may use 9.50 USD"),
        (("clear", "search"), "search may use any amount"),
    ]:
        assert quota_command.run(parsed(quota_command, *words)) == 0
        assert capsys.readouterr().out == f"{said} a month\n"
    assert asked == [("search", Quota(tokens=5000, device_s=7200)), (None, Quota(usd=9.5)), ("search", Quota())]
    answer.default_quota = Quota(steps=7)
    assert quota_command.run(parsed(quota_command, "clear", "search")) == 0
    like = "search, like every project without a quota of its own, may use 7 steps a month\n"
    assert capsys.readouterr().out == like
    for words, problem in [
        (("set", "search"), "at least one limit"),
        (("set", "--steps", "3"), "name one project"),
        (("clear", "search", "--every-project"), "name one project"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            quota_command.run(parsed(quota_command, *words))
    monkeypatch.delenv("ART_SERVER_URL", raising=False)
    with pytest.raises(ConfigError, match="--url or ART_SERVER_URL"):
        usage_command.run(parsed(usage_command))
