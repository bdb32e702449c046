"""Loads logged trajectories and metrics of a project as polars data frames, in functions to await as in older code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art.errors import ConfigError, NotFoundError
from art.storage.jsonl import read_lines
from art.storage.layout import DataDir
from art.storage.trajectories import read_groups

if TYPE_CHECKING:
    import polars as pl

logger = logging.getLogger(__name__)


async def load_trajectories(
    project_name: str, models: list[str] | None = None, debug: bool = False, art_path: str | Path | None = None
) -> pl.DataFrame:
    """Load every trajectory that models of a project have logged, one per row.

    Columns: model, split, step, group_number, rollout_number, reward, metric_<name>, metadata_<name>, messages, logs.
    A number is null where a trajectory does not have that metric.

    Args:
        models: Names of the models to read; by default all that have logged.
        debug: Log what is read.
        art_path: Data directory; by default `.art`.

    Raises:
        NotFoundError: the project, or a model, has no folder there.
        ConfigError: polars is not installed.
    """
    rows, number = [], 0
    for folder in _folders(project_name, models, art_path):
        for path in sorted((folder / "trajectories").glob("*/*.jsonl")):
            groups = list(read_groups(path))
            if debug:
                logger.warning("%s: %d groups", path, len(groups))
            for group in groups:
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
    polars = _polars()
    if frame.is_empty():
        return frame
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
    return _polars().DataFrame(rows, infer_schema_length=None, strict=False)


def _polars() -> Any:
    try:
        import polars
    except ImportError as error:
        raise ConfigError("art.utils.benchmarking needs polars: pip install polars") from error
    return polars
