"""How long a headless Chromium takes to draw the page of a data directory that `art view` serves. `viewer` runs it.

A view counts as drawn at the last change of the document after which nothing changes for half a second and no answer
is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_WATCH = """
(() => {
  const state = globalThis.paintWatch = {last: 0, waiting: 0, runs: null};
  new MutationObserver(() => {
    state.last = performance.now();
    if (state.runs === null && document.querySelector(".run-link")) state.runs = performance.now();
  }).observe(document, {childList: true, subtree: true, characterData: true, attributes: true});
  const ask = globalThis.fetch;
  globalThis.fetch = async (...args) => {
    state.waiting += 1;
    try { return await ask(...args); } finally { state.waiting -= 1; }
  };
})();
"""
_DRAWN = "() => paintWatch.waiting === 0 && paintWatch.last > 0 && performance.now() - paintWatch.last > 500"
_GO = "hash => { globalThis.goneAt = performance.now(); paintWatch.last = 0; location.hash = hash; }"
_LINE = "(opens once"


@dataclass(slots=True)
class Painted:
    """What a browser measured."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds by what was drawn."""
    grown_mb: float = 0.0
    """Memory of `art view` after all views, above what it was before the first."""

    def add(self, name: str, milliseconds: float) -> None:
        self.seconds.setdefault(name, []).append(milliseconds / 1000)


def paint(folder: Path, run: str, views: dict[str, str], chromium: str, repeats: int) -> Painted:
    """Open the page again and again, and walk from view to view.

    Args:
        run: PROJECT/NAME.
        views: address of each view below that of the run, e.g. `/curves`, by name.
        chromium: the program of the browser.
    """
    return asyncio.run(_paint(folder, run, views, chromium, repeats))


async def _paint(folder: Path, run: str, views: dict[str, str], chromium: str, repeats: int) -> Painted:
    from playwright.async_api import async_playwright

    painted = Painted()
    async with _art_view(folder) as (link, server), async_playwright() as playwright:
        before = server.memory_info().rss
        browser = await playwright.chromium.launch(executable_path=chromium)
        context = await browser.new_context()
        await context.add_init_script(_WATCH)
        page = await context.new_page()
        await page.goto(link)
        await page.wait_for_function(_DRAWN)
        root = link.partition("#")[0]
        for _ in range(repeats):
            await _open(context, painted, f"{root}#/", "list of runs")
            await _open(context, painted, f"{root}#/run/{run}", "a run")
            for name, address in views.items():
                await page.evaluate(_GO, f"#/run/{run}{address}")
                await page.wait_for_function(_DRAWN)
                if await page.locator(".view-nowhere, .state-failed").count():
                    raise RuntimeError(f"the view {address!r} does not exist or has failed")
                painted.add(f"view: {name}", await page.evaluate("paintWatch.last - goneAt"))
                await page.evaluate(_GO, "#/nowhere")
                await page.wait_for_function(_DRAWN)
        painted.grown_mb = (server.memory_info().rss - before) / 1e6
        await browser.close()
    return painted


async def _open(context: Any, painted: Painted, address: str, name: str) -> None:
    """Open an address in a new tab, and note the first paint and when all is drawn."""
    page = await context.new_page()
    await page.goto(address)
    await page.wait_for_function(_DRAWN)
    first = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    painted.add(f"opened: {name}, first paint", await page.evaluate(first))
    painted.add(f"opened: {name}, drawn", await page.evaluate("paintWatch.runs ?? paintWatch.last"))
    await page.close()


@contextlib.asynccontextmanager
async def _art_view(folder: Path) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Serve a directory, and yield the link that opens its page."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "art.cli.main", "view", str(folder), "--port", "0",
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not any(line.startswith(_LINE) for line in lines):
            line = (await process.stdout.readline()).decode()
            if not line:
                raise RuntimeError(f"art view ended with status {await process.wait()}: {lines}")
            lines.append(line.strip())
        yield next(line for line in lines if line.startswith("http")), psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
