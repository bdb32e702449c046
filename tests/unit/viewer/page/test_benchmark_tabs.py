"""The clients of the benchmark `page_open` ask what the page's views ask, at the same intervals."""

from __future__ import annotations

from pathlib import Path

from benchmarks import page_tabs

STATIC = Path(__file__).parents[4] / "src/art/viewer/static"


def read(name: str) -> str:
    return (STATIC / name).read_text()


def test_the_clients_ask_for_the_metrics_of_the_page() -> None:
    panes, curves = read("curves/main_panes.js"), read("views/curves.js")
    for metric in page_tabs.RUN_METRICS:
        assert metric.endswith("/reward") or f'"{metric}"' in panes, metric
    for metric in page_tabs.CURVES_METRICS:
        assert f'"{metric}"' in curves, metric


def test_the_clients_ask_as_often_as_the_page() -> None:
    for view in ("runs", "run", "curves"):
        assert f"refreshEvery({page_tabs.REFRESH_S:.0f}," in read(f"views/{view}.js"), view
    assert f"const REFRESH_S = {page_tabs.ROLLOUTS_S:.0f};" in read("views/rollouts.js")
