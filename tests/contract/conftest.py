"""Clients of a server that runs in the process of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from tests.support.app import KEY, AppBench


@pytest.fixture
async def http(app: AppBench) -> AsyncIterator[httpx2.AsyncClient]:
    async with app.http() as client:
        yield client


@pytest.fixture
def oai(http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://art.test/v1", api_key=KEY, max_retries=0, http_client=http)
