"""Compares logged trajectories and metrics of several models. It needs polars; charts need matplotlib."""

from art.compat.refused import refusals
from art.utils.benchmarking.charts import percentage_comparison_bar_chart, training_progress_chart
from art.utils.benchmarking.load_trajectories import (
    load_aggregated_trajectories,
    load_latest_metrics,
    load_trajectories,
)
from art.utils.benchmarking.types import BenchmarkModelKey

__all__ = [
    "BenchmarkModelKey",
    "load_aggregated_trajectories",
    "load_latest_metrics",
    "load_trajectories",
    "percentage_comparison_bar_chart",
    "training_progress_chart",
]

__getattr__ = refusals(__name__)
