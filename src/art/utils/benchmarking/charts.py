"""Draws charts of the data frames that `load_trajectories` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from art.errors import ConfigError
from art.utils.benchmarking.types import BenchmarkModelKey

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure


def training_progress_chart(
    df: pl.DataFrame,
    metric_name: str = "reward",
    models: Sequence[str | BenchmarkModelKey] | None = None,
    title: str | None = None,
    y_label: str | None = None,
    x_label: str = "training step",
) -> Figure:
    """Draw the mean of a metric over the steps, one line per model; a model with one step is a dashed line."""
    figure, axes = _axes(title, y_label or metric_name)
    axes.set_xlabel(x_label)
    for key, steps in _means(df, metric_name, models):
        if len(steps) == 1:
            axes.axhline(next(iter(steps.values())), linestyle="--", label=str(key))
        else:
            axes.plot(list(steps), list(steps.values()), marker="o", label=str(key))
    axes.legend()
    return figure


def percentage_comparison_bar_chart(
    df: pl.DataFrame,
    metric_name: str = "reward",
    models: Sequence[str | BenchmarkModelKey] | None = None,
    title: str | None = None,
    y_label: str | None = None,
) -> Figure:
    """Draw a bar per model: the mean of a metric from 0 to 1 at the model's last step, in per cent."""
    figure, axes = _axes(title, y_label or f"{metric_name} (%)")
    means = _means(df, metric_name, models)
    bars = axes.bar([str(key) for key, _ in means], [100 * list(steps.values())[-1] for _, steps in means])
    axes.bar_label(bars, fmt="%.0f%%")
    return figure


def _axes(title: str | None, y_label: str) -> tuple[Figure, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("charts need matplotlib: pip install matplotlib") from error
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.set_ylabel(y_label)
    if title is not None:
        axes.set_title(title)
    return figure, axes


def _means(
    df: pl.DataFrame, metric_name: str, models: Sequence[str | BenchmarkModelKey] | None
) -> list[tuple[BenchmarkModelKey, dict[int, float]]]:
    """The mean at each step, in order, for each model.

    Raises:
        ConfigError: no trajectory of a model has the metric.
    """
    column = metric_name if metric_name in df.columns else f"metric_{metric_name}"
    if column not in df.columns:
        metrics = ", ".join(name.removeprefix("metric_") for name in df.columns if name.startswith("metric_"))
        raise ConfigError(f"no trajectory has the metric {metric_name!r}; there are reward, {metrics}")
    keys = models if models is not None else df["model"].unique(maintain_order=True).to_list()
    means = []
    for key in (key if isinstance(key, BenchmarkModelKey) else BenchmarkModelKey(key) for key in keys):
        rows = df.filter(df["model"] == key.name)
        rows = (rows if key.split is None else rows.filter(rows["split"] == key.split)).drop_nulls(column)
        if rows.is_empty():
            raise ConfigError(
                f"model {key.name!r} has no trajectory with the metric {metric_name!r}, split {key.split!r}"
            )
        means.append((key, dict(rows.select("step", column).group_by("step").mean().sort("step").rows())))
    return means
