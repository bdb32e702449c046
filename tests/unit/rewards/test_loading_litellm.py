"""litellm is imported while rollouts run."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("litellm")

LOOK = """
import asyncio, sys
from art.rewards import judge_client

async def main():
    loading = asyncio.create_task(judge_client._load_litellm())
    while not loading.done():
        httpx = sys.modules.get("httpx")
        assert httpx is None or hasattr(httpx, "Response"), "openai would fail here, which looks at each request"
        await asyncio.sleep(0)
    await loading

asyncio.run(main())
"""


def test_no_thread_sees_a_half_imported_httpx() -> None:
    subprocess.run([sys.executable, "-c", LOOK], check=True, timeout=200)
