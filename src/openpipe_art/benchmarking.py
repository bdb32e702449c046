"""`art.utils.benchmarking`: trajectories and metrics that models have logged, as polars data frames and charts.

Charts need matplotlib. Functions that load are awaited, as in older code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art.errors import ConfigError, NotFoundError
from art.storage.jsonl import read_lines
from art.storage.layout import DataDir
from art.storage.trajectories import read_groups

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

__path__: list[str] = []
"""Makes this module a package without folders, so that older paths below it can be imported."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchmarkModelKey:
    """A model in a chart: its name, its label, and the split whose trajectories are shown."""

    name: str
    display_name: str | None = None
    split: str | None = None
    """Split to show; `None` shows all splits together."""

    def __str__(self) -> str:
        return self.display_name or self.name


async def load_trajectories(
    project_name: str, models: list[str] | None = None, debug: bool = False, art_path: str | Path | None = None
) -> pl.DataFrame:
    """Load every trajectory that models of a project have logged, one per row.

    Columns: model, split, step, group_number, rollout_number, reward, metric_<name>, metadata_<name>, messages, logs.
    A number is null where a trajectory does not have that metric.

    Args:
        models: Names of the models to read; by default all that have logged.
        debug: Log the names of the files.
        art_path: Data directory; by default `.art`.

    Raises:
        NotFoundError: the project, or a model, has no folder there.
        ConfigError: polars is not installed.
    """
    rows, number = [], 0
    for folder in _folders(project_name, models, art_path):
        for path in sorted((folder / "trajectories").glob("*/*.jsonl")):
            if debug:
                logger.warning("reading %s", path)
            for group in read_groups(path):
                number += 1
                for rollout, trajectory in enumerate(group):
                    rows.append(
                        {
                            "model": folder.name, "split": path.parent.name, "step": int(path.stem),
                            "group_number": number, "rollout_number": rollout, "reward": float(trajectory.reward),
                            **{f"metric_{key}": float(value) for key, value in trajectory.metrics.items()},
                            **{f"metadata_{key}": value for key, value in trajectory.metadata.items()},
                            "messages": trajectory.for_logging()["messages"], "logs": trajectory.logs,
                        }
                    )  # fmt: skip
    return _frame(rows)


async def load_aggregated_trajectories(
    project_name: str, models: list[str] | None = None, debug: bool = False, art_path: str | Path | None = None
) -> pl.DataFrame:
    """Load the mean reward and metrics of logged trajectories, and `num_trajectories`, by model, split and step."""
    frame = await load_trajectories(project_name, models, debug, art_path)
    if frame.is_empty():
        return frame
    import polars

    numbers = [name for name in frame.columns if name == "reward" or name.startswith("metric_")]
    keys = ["model", "split", "step"]
    counted = frame.group_by(keys).agg(polars.len().alias("num_trajectories"), *(polars.col(n).mean() for n in numbers))
    return counted.sort(keys)


async def load_latest_metrics(
    project_name: str, models: list[str] | None = None, art_path: str | Path | None = None
) -> pl.DataFrame:
    """Load the last logged value of every metric of a project's models, one row per model."""
    rows = []
    for folder in _folders(project_name, models, art_path):
        latest: dict[str, Any] = {"model": folder.name}
        for _, row in read_lines(folder / "history.jsonl"):
            latest |= {key: value for key, value in (row or {}).items() if value is not None}
        rows.append(latest)
    return _frame(rows)


def _folders(project: str, models: list[str] | None, art_path: str | Path | None) -> list[Path]:
    root = DataDir(Path(art_path or ".art")).root / project / "models"
    folders = [root / name for name in models] if models is not None else sorted(root.glob("*"))
    missing = [folder for folder in folders if not folder.is_dir()] if folders else [root]
    if missing:
        raise NotFoundError(
            f"no model has logged anything in {missing[0]}; give the name of a project, and as `art_path` the data "
            "directory"
        )
    return folders


def _frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    try:
        import polars
    except ImportError as error:
        raise ConfigError("art.utils.benchmarking needs polars: pip install polars") from error
    return polars.DataFrame(rows, infer_schema_length=None, strict=False)


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
