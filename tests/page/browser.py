"""A browser window that notes everything that a page should not do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.chromium import AXE
from tests.support.shop_run import MARK

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page


@dataclass
class Walker:
    """One page in a browser, the faults that it had so far, and a folder for its pictures."""

    browser: Browser
    page: Page
    shots: Path | None
    base: str = ""
    faults: list[str] = field(default_factory=list)

    async def open(self, link: str) -> None:
        """Open the page by a login link, or from a file."""
        self.base = link.partition("#")[0]
        await self.page.goto(link)

    async def go(self, address: str, waits_for: str) -> None:
        """Go to a view, wait for a text in it, and check that nothing went wrong."""
        await self.page.goto(f"{self.base}{address}")
        await self.sees(waits_for)
        await self.check(address)

    async def sees(self, text: str) -> None:
        await self.page.get_by_text(text).locator("visible=true").first.wait_for(timeout=10_000)

    async def check(self, where: str) -> None:
        assert not self.faults, f"{where}: {self.faults}"
        assert await self.page.evaluate(f"typeof window.{MARK}") == "undefined", f"{where}: a text ran as a script"
        wide = await self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 1, f"{where}: the page is {wide} pixels wider than the window"

    async def find_barriers(self) -> dict[str, list[str]]:
        """Return what axe-core finds serious in what the page shows now: elements by rule."""
        if AXE is None:
            pytest.skip("no axe-core: `make test-page` installs it, or name its folder in ART_AXE")
        if not await self.page.evaluate("'axe' in window"):
            await self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = await self.page.evaluate("axe.run().then(result => result.violations)")
        return {
            rule["id"]: [f"{node['html'][:200]} {node['failureSummary']}" for node in rule["nodes"][:3]]
            for rule in found
            if rule["impact"] in ("serious", "critical")
        }

    async def shoot(self, name: str) -> None:
        if self.shots is not None:
            self.shots.mkdir(parents=True, exist_ok=True)
            await self.page.wait_for_timeout(300)  # fades and charts end
            await self.page.screenshot(path=self.shots / f"{name}.png")

    def note(self, what: str, *about: Any) -> None:
        self.faults.append(" ".join([what, *map(str, about)]))

    def watch(self, page: Page) -> None:
        page.on("console", lambda said: self.note(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.note("error", error))
        page.on("request", lambda request: self._check_request(request.url))

    def _check_request(self, url: str) -> None:
        if not url.startswith((self.base, "data:", "blob:")):
            self.note("foreign request", url)


@asynccontextmanager
async def open_walker(chromium: str, shots: Path | None) -> AsyncIterator[Walker]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium)
        context = await browser.new_context(viewport={"width": 1280, "height": 860})
        page = await context.new_page()
        walker = Walker(browser, page, shots)
        walker.watch(page)
        yield walker
        await browser.close()
