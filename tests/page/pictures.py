"""Renew the pictures of the page in docs/images, from a run that learns.

.venv/bin/art demo --task mail_search --held-out 200 --out /tmp/search
.venv-page/bin/python -m tests.page.pictures /tmp/search/run-*
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from tests.page.browser import Walker, open_walker
from tests.page.chromium import CHROMIUM

IMAGES = Path(__file__).parents[2] / "docs" / "images"
RUN = "#/run/mail_search-mailbox-short/seed0"
STEP, GROUP = 3, 1
ROLLOUT, WRONG_WORD = 7, "wren"
"""A rollout of that group that searched for another word than the question has."""
HEIGHT = 660


async def draw(walker: Walker) -> None:
    page = walker.page
    await page.set_viewport_size({"width": 1280, "height": HEIGHT})
    await walker.go(RUN, "Importance ratio")  # the last chart; findings are there before it
    await walker.shoot("page-run")
    await walker.go(f"{RUN}/group/train/{STEP}/{GROUP}", "differs in message")
    await walker.shoot("page-group")
    await walker.go(f"{RUN}/tree/{STEP}", "learnt")
    await walker.shoot("page-tree")
    await walker.go(f"{RUN}/rollout/train/{STEP}/{GROUP}/{ROLLOUT}?tab=tokens&color=sampling_logprob", "Exact tokens")
    await page.set_viewport_size({"width": 1280, "height": 860})
    tokens = page.get_by_role("listbox", name="tokens of the path")
    await tokens.evaluate("view => { view.scrollTop = view.scrollHeight }")
    await page.get_by_role("option", name=re.compile(WRONG_WORD)).first.hover()
    await walker.shoot("page-tokens")


async def draw_all(link: str) -> None:
    assert CHROMIUM is not None, "no Chromium: install it, or name it in ART_CHROMIUM"
    async with open_walker(CHROMIUM, IMAGES) as walker:
        await walker.open(link)
        await walker.sees("seed0")
        await draw(walker)


def main(data_dir: str) -> None:
    art = Path(sys.executable).with_name("art")
    with subprocess.Popen([art, "view", data_dir], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        link = next(match[0] for line in server.stdout if (match := re.search(r"http\S+#login=\S+", line)))
        try:
            asyncio.run(draw_all(link))
        finally:
            server.terminate()


if __name__ == "__main__":
    main(sys.argv[1])
