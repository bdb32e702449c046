"""The report has the colours of the live page, where people look at the same run."""

from __future__ import annotations

import re
from importlib.resources import files

THEMES = {"light": 0, "dark": 1}
SAME = {"ink": "text", "soft": "soft", "rule": "line", "before": "line-strong", "good": "good", "bad": "bad"}
"""Colours of the report, and the page's names for them."""


def colours(text: str, theme: int) -> dict[str, str]:
    """The colours of one theme: a style sheet names the light ones first."""
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", text)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[theme]))


def test_the_report_has_the_colours_of_the_page() -> None:
    page = files("art_page").joinpath("static")
    report = files("art_recipes").joinpath("report.css").read_text()
    base = page.joinpath("styles/base.css").read_text()
    (train,) = re.findall(r'CATEGORIES = \["(#[0-9a-f]{6})"', page.joinpath("lib/colours.js").read_text())
    for theme in THEMES.values():
        own, theirs = colours(report, theme), colours(base, theme)
        assert {name: own[name] for name in SAME} == {name: theirs[other] for name, other in SAME.items()}
        assert own["after"] == train, "training has one colour"
