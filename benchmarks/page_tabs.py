"""The tabs of `page_open`, in a process of their own: clients that send what the page sends, or a real browser.

`page_open` starts it, says `open` and `close` on its standard input, and reads a line of JSON after each.

    python -m benchmarks.page_tabs URL PROJECT/NAME run,curves,rollouts,live [CHROMIUM]     (the key is in ART_API_KEY)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import httpx

# Intervals and requests are those of src/art_page/static/views; change both together.
REFRESH_S, ROLLOUTS_S = 2.0, 10.0
RUN_METRICS = [
    "train/reward", "val/reward", "loss/entropy", "loss/entropy_varying", "loss/kl_to_sampler",
    "offpolicy/last_update_kl", "offpolicy/ratio_p10", "offpolicy/ratio_p50", "offpolicy/ratio_p90",
    "time/step_s/gpu/rollouts", "time/step_trainer_s", "time/publish_s", "throughput/train_tokens_per_s",
    "throughput/train_tree_tokens_per_s",
]  # fmt: skip
CURVES_METRICS = ["train/reward", "val/reward", "loss/train", "loss/entropy", "loss/kl_to_sampler", "loss/grad_norm"]
TABLE = {"sort": "step", "descending": "true", "offset": 0, "limit": 100}


_ADDRESSES = {
    "runs": "#/", "run": "#/run/{run}", "curves": "#/run/{run}/curves", "rollouts": "#/run/{run}/rollouts",
    "live": "#/live",
}  # fmt: skip


class Tabs(Protocol):
    """Tabs that can be opened and closed again and again."""

    async def open(self) -> None: ...

    async def close(self) -> Counter[str]:
        """Close the tabs, and return what they have done since they were opened."""
        ...


class PlainTabs:
    """Clients without a browser. Each asks what its view asks, at the view's intervals, with the answers' tags."""

    def __init__(self, url: str, key: str, run: str, views: list[str]) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(base_url=f"{url}/view/api/", headers=headers, timeout=30)
        self._run, self._views = f"runs/{run}", views
        self._tasks: list[asyncio.Task[None]] = []
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        self._counts.clear()
        tabs: dict[str, Callable[[_Answers], Awaitable[None]]] = {
            "runs": self._runs, "run": self._one_run, "curves": self._curves, "rollouts": self._rollouts,
            "live": self._live,
        }  # fmt: skip
        self._tasks = [asyncio.ensure_future(tabs[view](_Answers(self._client, self._counts))) for view in self._views]

    async def close(self) -> Counter[str]:
        if ended := [task for task in self._tasks if task.done()]:
            raise RuntimeError(f"a tab has ended: {ended[0]}")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._counts

    async def _runs(self, answers: _Answers) -> None:
        while True:
            await answers.get("runs")
            await asyncio.sleep(REFRESH_S)

    async def _one_run(self, answers: _Answers) -> None:
        shown: object = None
        while True:
            detail = await answers.get(self._run)
            key = (detail["step"], len(detail["metrics"]), len(detail["all_findings"]), detail["num_rollouts"])
            if key != shown:
                shown = key
                known = {metric["name"] for metric in detail["metrics"]}
                await answers.get(f"{self._run}/series", metric=[name for name in RUN_METRICS if name in known])
                await answers.get(f"{self._run}/steps/{detail['step']}")
            await asyncio.sleep(REFRESH_S)

    async def _curves(self, answers: _Answers) -> None:
        while True:
            known = {metric["name"] for metric in (await answers.get(self._run))["metrics"]}
            await answers.get(f"{self._run}/series", metric=[name for name in CURVES_METRICS if name in known])
            await asyncio.sleep(REFRESH_S)

    async def _rollouts(self, answers: _Answers) -> None:
        while True:
            await answers.get(self._run)
            await answers.get(f"{self._run}/rollouts", **TABLE)
            await asyncio.sleep(ROLLOUTS_S)

    async def _live(self, answers: _Answers) -> None:
        async with self._client.stream("GET", "live") as stream:
            stream.raise_for_status()
            async for data in stream.aiter_bytes():
                self._counts["bytes"] += len(data)


class _Answers:
    """One tab's answers, kept with their tags as lib/api.js keeps them."""

    def __init__(self, client: httpx.AsyncClient, counts: Counter[str]) -> None:
        self._client, self._counts = client, counts
        self._kept: dict[str, tuple[str, Any]] = {}

    async def get(self, path: str, **query: Any) -> Any:
        request = self._client.build_request("GET", path, params=query)
        kept = self._kept.get(str(request.url))
        if kept is not None:
            request.headers["if-none-match"] = kept[0]
        response = await self._client.send(request)
        self._counts["requests"] += 1
        self._counts["bytes"] += len(response.content)
        if response.status_code == httpx.codes.NOT_MODIFIED and kept is not None:
            self._counts["not_modified"] += 1
            return kept[1]
        response.raise_for_status()
        answer = response.json()
        self._kept[str(request.url)] = (response.headers["etag"], answer)
        return answer


class BrowserTabs:
    """Tabs of a headless Chromium. All of them count as visible, so all of them refresh."""

    def __init__(self, url: str, context: Any, run: str, views: list[str]) -> None:
        self._url, self._context, self._run, self._views = url, context, run, views
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        self._counts.clear()
        for view in self._views:
            page = await self._context.new_page()
            page.on("requestfinished", lambda _: self._counts.update(["requests"]))
            page.on("pageerror", lambda error: self._counts.update([f"error: {error}"]))
            await page.goto(f"{self._url}/{_ADDRESSES[view].format(run=self._run)}")
            await page.locator(f".view-{view}").wait_for()

    async def close(self) -> Counter[str]:
        for page in self._context.pages:
            await page.close()
        return self._counts


@contextlib.asynccontextmanager
async def open_browser(url: str, key: str, run: str, views: list[str], chromium: str) -> AsyncIterator[BrowserTabs]:
    """Start a headless Chromium and log in."""
    from playwright.async_api import async_playwright

    from art.client.client import ServerClient

    async with async_playwright() as playwright, ServerClient(url, key) as client:
        browser = await playwright.chromium.launch(executable_path=chromium)
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(await client.page_link())
        await page.locator(".view-runs").wait_for()
        await page.close()
        yield BrowserTabs(url, context, run, views)
        await browser.close()


async def main(url: str, run: str, views: str, chromium: str | None = None) -> None:
    """Do what standard input says until it ends."""
    key, names = os.environ["ART_API_KEY"], views.split(",")
    if chromium is None:
        await _serve(PlainTabs(url, key, run, names))
        return
    async with open_browser(url, key, run, names, chromium) as tabs:
        await _serve(tabs)


async def _serve(tabs: Tabs) -> None:
    print(json.dumps({}), flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        counts: Counter[str] = Counter()
        if line == "close":
            counts = await tabs.close()
        else:
            await tabs.open()
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
