"""The client of `chat_cost`: sends chat requests as each line of standard input says, and answers when all are done.

{"count": 2000, "at_once": 64}  -->  {"wall_s": 3.1}
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

import art
from benchmarks.serve_load import NAME, PROJECT, PROMPTS

NEW_TOKENS = 8
Ask = Callable[[dict[str, Any]], Awaitable[Any]]


async def serve(kind: str, base_model: str) -> None:
    url, key = os.environ["ART_BASE_URL"], os.environ["ART_API_KEY"]
    rng = random.Random(0)
    async with art.Backend(url, key) as backend, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        model = art.TrainableModel(name=NAME, project=PROJECT, base_model=base_model)
        await model.register(backend)
        client = model.openai_client()

        async def raw(body: dict[str, Any]) -> None:
            async with http.post(
                f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
            ) as answer:
                content = await answer.json()
                assert answer.status == 200, content

        async def through_openai(body: dict[str, Any]) -> None:
            await client.chat.completions.create(**body)

        ask: Ask = raw if kind == "raw" else through_openai
        name = f"{PROJECT}/{NAME}"
        while line := await asyncio.to_thread(sys.stdin.readline):
            task = json.loads(line)
            started = time.perf_counter()
            numbers = iter(range(task["count"]))
            await asyncio.gather(*(play(ask, name, numbers, rng) for _ in range(task["at_once"])))
            print(json.dumps({"wall_s": time.perf_counter() - started}), flush=True)


async def play(ask: Ask, model: str, numbers: Any, rng: random.Random) -> None:
    for number in numbers:
        words = " ".join(itertools.chain(rng.choices(PROMPTS, k=1), [str(rng.randrange(10**6))]))
        await ask(
            {
                "model": model, "messages": [{"role": "user", "content": words}],
                "max_completion_tokens": NEW_TOKENS, "seed": number,
            }
        )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
