"""`art.utils.benchmarking`: what models have logged, as data frames and charts."""

from __future__ import annotations

from pathlib import Path

import pytest

import art
from art.errors import ConfigError, NotFoundError
from art.utils.benchmarking.charts import percentage_comparison_bar_chart, training_progress_chart
from art.utils.benchmarking.load_trajectories import (
    load_aggregated_trajectories,
    load_latest_metrics,
    load_trajectories,
)
from art.utils.benchmarking.types import BenchmarkModelKey

polars = pytest.importorskip("polars", reason="benchmarking needs polars")


@pytest.fixture
async def logged(tmp_path: Path) -> Path:
    for name, steps in (("agent", [0, 1]), ("gpt", [0])):
        model = art.Model(name=name, project="games", base_path=str(tmp_path))
        for step in steps:
            trajectories = [
                art.Trajectory(messages_and_choices=[{"role": "user", "content": "go"}], reward=step + i, seat="x",
                               metrics={"win": bool(i)} if i else {})
                for i in range(2)
            ]  # fmt: skip
            await model.log(trajectories, split="val", step=step)
    return tmp_path


async def test_frames(logged: Path) -> None:
    frame = await load_trajectories("games", art_path=logged)
    assert frame.shape[0] == 6
    assert set(frame.columns) == {
        "model", "split", "step", "group_number", "rollout_number", "reward", "metric_win", "metadata_seat", "messages",
        "logs",
    }  # fmt: skip
    assert frame.filter((frame["model"] == "agent") & (frame["step"] == 1))["reward"].to_list() == [1.0, 2.0]
    assert frame["metric_win"].null_count() == 3
    means = await load_aggregated_trajectories("games", ["agent"], art_path=logged)
    assert means["reward"].to_list() == [0.5, 1.5]
    assert means["num_trajectories"].to_list() == [2, 2]
    latest = await load_latest_metrics("games", art_path=logged)
    assert dict(zip(latest["model"], latest["val/reward"], strict=True)) == {"agent": 1.5, "gpt": 0.5}
    with pytest.raises(NotFoundError, match="nobody"):
        await load_trajectories("games", ["nobody"], art_path=logged)


async def test_charts(logged: Path) -> None:
    frame = await load_trajectories("games", art_path=logged)
    (axes,) = training_progress_chart(
        frame, "reward", ["agent", BenchmarkModelKey("gpt", "GPT", "val")], title="wins"
    ).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.5, 1.5], [0.5, 0.5]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["agent", "GPT"]
    (axes,) = percentage_comparison_bar_chart(frame, "win").axes
    assert [bar.get_height() for bar in axes.patches] == [100.0, 100.0]
    with pytest.raises(ConfigError, match="no trajectory has the metric 'wins'; there are reward, win"):
        training_progress_chart(frame, "wins")
