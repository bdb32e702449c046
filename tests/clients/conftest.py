"""Collects how each client did each task; `--write-page` makes docs/clients.md of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.clients import CLIENTS
from tests.clients.model import open_scripted_bench
from tests.clients.page import COLUMNS, PAGE, Cell, Table, render_page
from tests.support.served_app import ServedApp, serve_app

TABLE = pytest.StashKey[Table]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-page", action="store_true", help="write docs/clients.md from the results of this run")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = Table()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the result of a test that has the parameters `name`, a client, and `task`, a column."""
    report = yield
    params: dict[str, Any] = (
        item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    )
    if {"name", "task"} <= params.keys() and (report.when == "call" or not report.passed):
        error = None if call.excinfo is None else str(call.excinfo.value)
        item.config.stash[TABLE].add(params["name"], params["task"], Cell.of(report, error), dict(item.user_properties))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("write_page", default=False):
        return
    table = config.stash[TABLE]
    missing = [f"{name} {column}" for name in CLIENTS for column in COLUMNS if (name, column) not in table.cells]
    if missing:
        terminalreporter.write_line(f"docs/clients.md: left as it is, because this run lacks {', '.join(missing)}")
    else:
        PAGE.write_text(render_page(table))
        terminalreporter.write_line("docs/clients.md: written")


@pytest.fixture
async def served(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[ServedApp]:
    """The real application behind a real socket, over a scripted model."""
    async with serve_app(tmp_path, tokenizer_dir, open_scripted_bench) as opened:
        yield opened
