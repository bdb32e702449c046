"""Columns of metrics: rows of a step that come again, or too late; and curves that are thinned."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.storage.layout import DataDir
from art_page.run_answers import SeriesQuery
from art_page.run_files import Columns
from art_page.viewer import Viewer
from tests.support.viewer_dirs import RUN, log


@given(st.lists(st.tuples(st.integers(-3, 8), st.floats(-5, 5)), max_size=12))
def test_points_are_the_means_of_the_rows_of_each_step(rows: list[tuple[int, float]]) -> None:
    columns = Columns()
    for step, value in rows:
        columns.add(step, {"loss": value})
    points = columns.points("loss")
    by_step = {step: [value for at, value in rows if at == step] for step in sorted({step for step, _ in rows})}
    assert points.steps.tolist() == list(by_step)
    assert points.counts.tolist() == [len(values) for values in by_step.values()]
    np.testing.assert_allclose(points.means, [statistics.fmean(values) for values in by_step.values()], atol=1e-12)
    assert len(columns.points("other").steps) == 0


@pytest.mark.parametrize("max_points", [2, 3, 6, 7, 100])
def test_a_thinned_curve_without_intervals_is_made_of_means_of_its_steps(
    viewer: Viewer, data_dir: DataDir, max_points: int
) -> None:
    steps = [1, 2, 4, 7, 8, 9, 12]
    for step in steps:
        log(data_dir, [], step=step, loss__entropy=step**2.0)
    (curve,) = viewer.series(*RUN, SeriesQuery(metric=["loss/entropy"], max_points=max_points)).series
    width = -(-len(steps) // max_points)
    parts = [steps[i : i + width] for i in range(0, len(steps), width)]
    assert curve.steps == [part[len(part) // 2] for part in parts]
    assert curve.mean == pytest.approx([statistics.fmean(step**2.0 for step in part) for part in parts])
    assert curve.num_steps == (None if width == 1 else [len(part) for part in parts])
    assert len(curve.steps) <= max_points
