"""Clients of `model.openai_client()` with the light path and without, and a view of which way a request took."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from art.client.openai_client import STOCK_CLIENT, LightCompletions, make_openai_client

PLAIN: dict[str, Any] = {"model": "p/m", "messages": [{"role": "user", "content": "hello"}]}


class Watch:
    """Counts requests that the light path sent, and those of them that it handed over to the SDK."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.light, self.handed_over = 0, 0
        ask = LightCompletions.ask

        async def counted(completions: LightCompletions, *args: Any) -> Any:
            result = await ask(completions, *args)
            self.light += 1
            self.handed_over += result is None
            return result

        monkeypatch.setattr(LightCompletions, "ask", counted)


@contextlib.asynccontextmanager
async def clients(
    base_url: str, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI]]:
    """Give a stock client and one whose light path is open after a first request, both with these options."""
    monkeypatch.setenv(STOCK_CLIENT, "1")
    stock = make_openai_client(base_url, "key", model="p/m")
    monkeypatch.setenv(STOCK_CLIENT, "0")
    light = make_openai_client(base_url, "key", model="p/m")
    async with stock, light:
        light_copy = light.with_options(**changes)
        await light_copy.chat.completions.create(**PLAIN)
        yield stock.with_options(**changes), light_copy
