"""Bins of a row become histograms, for trackers that show them."""

from __future__ import annotations

from datetime import UTC, datetime

from art.metrics.catalogue import describe
from art.sinks import Histogram, Row


def make_row(metrics: dict[str, float]) -> Row:
    return Row(number=0, step=1, recorded_at=datetime.now(UTC), metrics=metrics)


def test_bins_are_one_histogram_and_the_rest_stays() -> None:
    metrics = describe("data/reward", [0.0, 1.0, 0.5, 0.0]) | {"loss/train": 0.1, "odd_hist/0": 3.0, "odd_hist/x": 1.0}
    scalars, histograms = make_row(metrics).split_histograms()
    assert histograms == {
        "data/reward_hist": Histogram(
            (0.0, 0.1, 0.2, 0.30000000000000004, 0.4, 0.5, 0.6000000000000001, 0.7000000000000001, 0.8, 0.9, 1.0),
            (2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0),
        )
    }
    assert scalars.keys() == {name for name in metrics if not name.startswith("data/reward_hist/")}


def test_equal_values_have_one_bin_around_them() -> None:
    _, histograms = make_row(describe("data/reward", [2.0, 2.0])).split_histograms()
    assert histograms == {"data/reward_hist": Histogram((1.5, 2.5), (2.0,))}
