"""The page that a run ends with: what is on it, what is left out, and that nothing on it is more than text."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from art.metrics.scores import estimate, estimate_change, t_quantile
from art_recipes.report import (
    MAX_MESSAGE_CHARS,
    Headline,
    Report,
    ScoredRollout,
    SideBySide,
    render_report,
    write_report,
)
from art_recipes.training.training_loop import duration

EVIL = "<script>alert('x')</script><img src=https://example.org/x>"


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text += data


def conversation(answer: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "get_product", "arguments": '{"sku": "P-100"}'}}
    return [
        {"role": "system", "content": "You solve tasks."},
        {"role": "user", "content": "What is the price?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": EVIL},
        {"role": "assistant", "content": answer},
    ]


def full(evil: str = EVIL) -> Report:
    before, after = [0.2, 0.3, 0.5], [0.6, 0.65, 0.7]
    return Report(
        title=f"shop {evil}",
        summary=f"about {evil}",
        headline=Headline(
            measure=f"score {evil}", before=estimate(before), after=estimate(after),
            change=estimate_change(enumerate(before), enumerate(after)),
        ),
        rewards=[(1, 0.1), (2, math.nan), (3, 0.3)],
        comparisons=[
            SideBySide(
                scenario=f"a chair {evil}", before_score=0.25, after_score=0.75,
                before=ScoredRollout(messages=conversation("12"), score=0.2, explanation=evil, note=evil),
                after=ScoredRollout(messages=conversation("x" * (MAX_MESSAGE_CHARS + 7)), score=0.9),
            )
        ],
        costs=f"judge {evil}",
        faults=[evil],
        command=f"art {evil}",
    )  # fmt: skip


def test_whatever_models_and_tools_wrote_stays_text() -> None:
    html = render_report(full())
    page = Page(html)
    assert page.open == [], "every tag is closed"
    assert not {"script", "link", "iframe", "a"} & set(page.tags)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert "default-src 'none'" in html
    assert page.text.count(EVIL) >= 12, "it is shown all the same"
    html = re.sub(r"data:image/png;base64,[\w+/=]*", "", html)
    assert not re.search(r"(https?:)?//", html.replace("https://example.org", "").replace("'none'", ""))


def test_the_parts_of_a_page() -> None:
    text = Page(render_report(full(""))).text
    assert "0.33" in text
    assert "0.65" in text
    assert "+0.32 (+0.06 to +0.58)" in text
    assert "better: the 95 % interval of the change is above 0" in text
    assert "[7 more characters]" in text
    assert 'get_product {"sku": "P-100"}' in text
    assert "You solve tasks." not in text, "what both rollouts begin with is not repeated on each side"
    assert "a chair  0.25 to 0.75 +0.50" in text


@pytest.mark.parametrize(
    ("after", "verdict"),
    [([0.1, 0.1, 0.3], "worse"), ([0.9, 0.1, 0.5], "no clear change"), ([0.6, 0.7, 0.9], "better")],
)
def test_the_verdict_follows_from_the_interval_of_the_change(after: list[float], verdict: str) -> None:
    before = [0.2, 0.25, 0.45]
    headline = Headline(
        measure="score",
        before=estimate(before),
        after=estimate(after),
        change=estimate_change(enumerate(before), enumerate(after)),
    )
    assert f"{verdict}:" in Page(render_report(Report(title="t", summary="s", headline=headline))).text


def test_one_pair_says_nothing_about_certainty() -> None:
    only = estimate([0.5])
    text = Page(
        render_report(
            Report(title="t", summary="s", headline=Headline(measure="m", before=only, after=only, change=only))
        )
    ).text
    assert "one pair only" in text
    assert "inf" not in text


def test_what_is_not_given_is_not_there() -> None:
    page = Page(render_report(Report(title="t", summary="s")))
    assert "section" not in page.tags
    assert "img" not in page.tags


def test_files(tmp_path: Path) -> None:
    one = estimate([1.0])
    report = Report(title="ä", summary="s", headline=Headline(measure="m", before=one, after=one, change=one))
    path = write_report(tmp_path / "new", report)
    assert path.read_text(encoding="utf-8") == render_report(report)
    data = json.loads((tmp_path / "new" / "report.json").read_text(encoding="utf-8"))
    assert data["title"] == "ä"
    assert data["headline"]["change"] == {"mean": 1.0, "low": None, "high": None, "count": 1}
    assert sorted(p.name for p in path.parent.iterdir()) == ["report.html", "report.json"]


@pytest.mark.parametrize(
    ("degrees", "exact"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (11, 2.20099), (30, 2.04227), (1000, 1.96234)],
)  # fmt: skip
def test_students_t(degrees: int, exact: float) -> None:
    assert t_quantile(degrees) == pytest.approx(exact, rel=4e-6)


@pytest.mark.parametrize(
    ("degrees", "share", "exact"),
    [(1, 0.95, 6.31375), (2, 0.995, 9.92484), (9, 0.9995, 4.78091), (19, 0.99, 2.53948), (40, 0.9999, 4.09421),
     (99, 0.9999, 3.86309), (100, 0.9999, 3.86160),
     (2_000_000, 0.99, 2.32635)],
)  # fmt: skip
def test_students_t_at_other_shares(degrees: int, share: float, exact: float) -> None:
    assert t_quantile(degrees, share) == pytest.approx(exact, rel=5e-6)


def test_pairs_do_not_suffer_from_what_scenarios_differ_in() -> None:
    before, after = [0.1, 0.5, 0.9], [0.2, 0.6, 1.0]
    change = estimate_change(enumerate(before), enumerate(after))
    assert (change.low, change.mean, change.high) == pytest.approx((0.1, 0.1, 0.1))
    assert estimate(before).high - estimate(before).low > 1
    with pytest.raises(ValueError, match="empty list"):
        estimate([])


def test_a_curve_is_drawn_without_values_that_are_no_numbers() -> None:
    pytest.importorskip("matplotlib")
    curves = [list(enumerate((0.33, math.nan, 0.7))), [(4, 0.5)], [(1, math.nan)], []]
    pages = [Page(render_report(Report(title="t", summary="s", rewards=rewards))) for rewards in curves]
    assert [page.tags.count("img") for page in pages] == [1, 1, 0, 0]


def test_durations() -> None:
    assert [duration(s) for s in (8.44, 200, 7500)] == ["8.4 s", "3 min 20 s", "2 h 5 min"]
