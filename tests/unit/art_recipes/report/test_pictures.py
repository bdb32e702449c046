"""Pictures for matplotlib show the values that they were given, with their intervals."""

from __future__ import annotations

from typing import Any

import pytest

from art.metrics.scores import mean_with_interval
from art_recipes.training.pictures import plot_learning, plot_scores, plot_seeds

Figure = pytest.importorskip("matplotlib.figure").Figure

WINS = [1.0, 0.0, 1.0, 1.0]


@pytest.fixture
def axes() -> Any:
    return Figure().subplots()


def bars(axes: Any) -> list[list[float]]:
    """The ends of each error bar, as x and y of both."""
    return [segment.ravel().tolist() for each in axes.containers for segment in each.lines[2][0].get_segments()]


def test_a_curve_has_its_steps_and_evaluations(axes: Any) -> None:
    plot_learning(axes, [0.25, 0.75], held_out={0: [0.0, 0.0, 1.0, 1.0], 2: WINS}, measure="win", title="A game")
    assert axes.lines[0].get_xydata().tolist() == [[1, 0.25], [2, 0.5]], "the running mean"
    low, high = mean_with_interval(WINS)[1]
    assert bars(axes)[1] == pytest.approx([2, low, 2, high])
    assert [text.get_text() for text in axes.texts] == ["0.50", "0.75"]
    assert (axes.get_ylabel(), axes.get_title(loc="left")) == ("win, mean over rollouts", "A game")
    assert "held out (4), 95 % interval" in axes.get_legend_handles_labels()[1]
    assert axes.get_ylim() == (-0.02, 1.05)
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_rewards_outside_0_and_1_get_an_axis_of_their_own(axes: Any) -> None:
    plot_learning(axes, {5: -2.0}, held_out={0: [-3.0, -1.0], 5: [4.0]})
    assert axes.get_ylim()[0] < -3
    assert axes.get_ylim()[1] > 4
    assert bars(axes)[1] == [5, 4, 5, 4], "a single value has no interval"


def test_a_model_that_was_not_trained_again_has_only_its_evaluations(axes: Any) -> None:
    plot_learning(axes, {}, held_out={0: WINS, 30: WINS})
    assert len(bars(axes)) == 2


def test_seeds_have_a_band_from_the_lowest_to_the_highest(axes: Any) -> None:
    curves = [{1: 0.2, 2: 0.4}, {1: 0.4, 2: 0.8}, {1: 0.3}]
    plot_seeds(axes, curves, held_out={0: [0.1, 0.3], 2: [0.5, 0.9]}, measure="win")
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((0.2, 0.6)), "of running means"
    assert axes.lines[0].get_ydata() == pytest.approx([0.3, 0.45])
    assert bars(axes) == [pytest.approx([0, 0.1, 0, 0.3]), pytest.approx([2, 0.5, 2, 0.9])]
    assert [text.get_text() for text in axes.texts] == ["0.20", "0.70"]
    assert "mean of 3 seeds, over 5 steps" in axes.get_legend_handles_labels()[1]


def test_scores_have_a_row_for_each_name(axes: Any) -> None:
    plot_scores(axes, {"before": [0.2, 0.4], "after": [0.9]})
    assert [label.get_text() for label in axes.get_yticklabels()] == ["before", "after"]
    shown = axes.collections[0].get_offsets()
    assert shown[:, 0].tolist() == [0.2, 0.4]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first row is at the top"
    assert [text.get_text() for text in axes.texts] == ["0.30", "0.90"]


def test_nothing_to_draw_is_an_error(axes: Any) -> None:
    with pytest.raises(ValueError, match="there are no scores to draw"):
        plot_scores(axes, {})
    with pytest.raises(ValueError, match="'after' has no values to draw"):
        plot_scores(axes, {"before": [1.0], "after": []})
    with pytest.raises(ValueError, match="'step 3' has no values"):
        plot_learning(axes, [0.5], held_out={3: []})
