"""A pytest plugin for the tests of OpenAI's own package: `AsyncOpenAI` is the client of `model.openai_client()`.

It takes the place of `openai.AsyncOpenAI` before the tests import it. Clients over aiohttp have the light path open, as
`make_openai_client` opens it. With `ART_STOCK_CLIENT=1` nothing is replaced: the same tests against the stock class.
A client that is to take the light path makes one request more, from which it learns. At the end the plugin says how many requests went the
light way.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import openai
import pytest

from art.client import openai_client
from art.client.http import Hooks
from art.client.openai_client import STOCK_CLIENT, LightCompletions, add_handover

counts = {"light": 0, "handed over": 0}


class AsyncOpenAI(openai_client.AsyncOpenAI):
    @functools.wraps(openai.AsyncOpenAI.__init__)
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        add_handover(self._client)
        self.hooks = Hooks(self._client.event_hooks, lambda: bool(sum(map(len, self._client.event_hooks.values()))))


if os.environ.get(STOCK_CLIENT) != "1":
    AsyncOpenAI.__module__ = openai.AsyncOpenAI.__module__
    openai.AsyncOpenAI = AsyncOpenAI  # type: ignore[misc]
    openai.AsyncClient = AsyncOpenAI  # type: ignore[misc]

create = LightCompletions.create


async def create_after_learning(completions: LightCompletions, *args: Any, **arguments: Any) -> Any:
    if completions.plain_body(arguments) is not None and not completions.knows():
        await create(completions, model="m", messages=[])
    return await create(completions, *args, **arguments)


LightCompletions.create = create_after_learning  # type: ignore[method-assign]
ask = LightCompletions.ask


async def counted(completions: LightCompletions, *args: Any) -> Any:
    result = await ask(completions, *args)
    counts["light"] += 1
    counts["handed over"] += result is None
    return result


LightCompletions.ask = counted  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    logging.getLogger("openai").setLevel(
        logging.NOTSET
    )  # a debug log, which their conftest asks for, ends the light path


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"light path: {counts}")
