"""Findings and failed jobs are sent once, by a webhook or a command, and what cannot be sent stops nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from art.config import ServerConfig
from art.errors import ConfigError
from art.protocol.live import FindingMade, JobMoved
from art.runtime.alerts import Alerts

RULE = "The rewards are equal. Use harder scenarios."


def finding(step: int, seen: str = "share is 1", rule: str = RULE) -> FindingMade:
    return FindingMade(project="p", name="m", step=step, text=f"{seen}: {rule}")


@contextlib.asynccontextmanager
async def webhook(status: int = 200) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """A server of webhooks: its address, and what it got."""
    got: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        got.append(json.loads(await reader.readexactly(size)))
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook", got
    finally:
        server.close()


@contextlib.asynccontextmanager
async def sending(address: str, file: Path) -> AsyncIterator[Alerts]:
    alerts = Alerts(address, file)
    task = asyncio.create_task(alerts.run())
    try:
        yield alerts
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(is_done: object) -> None:
    assert callable(is_done)
    for _ in range(500):
        if is_done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 seconds")


async def test_a_finding_is_posted_once_also_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "alerts.jsonl"
    async with webhook() as (address, got):
        async with sending(address, file) as alerts:
            for step in (3, 4):
                alerts.take("p", finding(step, seen=f"share is {step}"))
            failed = JobMoved(job_id="j", job_kind="train", project="p", name="m", state="failed", error="no memory")
            alerts.take("p", failed)
            await until(lambda: file.exists() and len(file.read_bytes().splitlines()) == 2)
        async with sending(address, file) as alerts:
            alerts.take("p", finding(5))
            alerts.take("p", finding(5, rule="Another rule."))
            await until(lambda: len(got) == 3)
    assert got[0] == {
        "text": f"p/m, step 3: share is 3: {RULE}", "project": "p", "name": "m", "step": 3,
        "finding": f"share is 3: {RULE}",
    }  # fmt: skip
    assert [one["text"] for one in got[1:]] == [
        "p/m: the job train failed: no memory", "p/m, step 5: share is 1: Another rule."
    ]  # fmt: skip


async def test_a_command_gets_the_text_on_its_standard_input(tmp_path: Path) -> None:
    mail = tmp_path / "a mail.txt"
    program = f"import sys, pathlib; pathlib.Path({str(mail)!r}).write_text(sys.stdin.read())"
    async with sending(shlex.join([sys.executable, "-c", program]), tmp_path / "alerts.jsonl") as alerts:
        alerts.take("p", finding(1))
        await until((tmp_path / "alerts.jsonl").exists)
    assert mail.read_text() == f"p/m, step 1: share is 1: {RULE}\n"


async def test_what_cannot_be_sent_is_logged_and_tried_when_it_comes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with webhook(status=500) as (address, got), sending(address, tmp_path / "alerts.jsonl") as alerts:
        alerts.take("p", finding(1))
        await until(lambda: "an alert was not sent" in caplog.text)
        assert RULE in caplog.text
        alerts.take("p", finding(2))
        await until(lambda: len(got) == 2)
    caplog.clear()
    for wrong in ("/no/such/program", f"{sys.executable} -c 'raise SystemExit(3)'", "http://127.0.0.1:1/"):
        async with sending(wrong, tmp_path / "none.jsonl") as alerts:
            alerts.take("p", finding(1))
            await until(lambda: "an alert was not sent" in caplog.text)
        caplog.clear()
    assert not (tmp_path / "none.jsonl").exists()


def test_an_empty_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        ServerConfig(alerts=" ")
