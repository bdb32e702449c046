"""What a user of each tracker sees: curves and the config of the run, read by the tracker's own library."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Curves = dict[str, list[tuple[int, float]]]


@dataclass
class Seen:
    """The run as a tracker shows it."""

    curves: Curves
    num_runs: int
    config: str | None = ""
    """The run's config as text; `None` for a tracker that has none."""
    histograms: dict[int, list[float]] | None = None
    """Counts of `data/reward_hist` by step; `None` for a tracker without histograms."""


def environment(folder: Path) -> dict[str, str]:
    """Variables that keep every tracker's files in a folder."""
    return {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
    }  # fmt: skip


def model_folder(folder: Path) -> Path:
    return folder / "games" / "models" / "agent"


def see_wandb(folder: Path) -> Seen:
    from wandb.proto import wandb_internal_pb2

    from art_trackers.wandb import history_rows, records

    curves: Curves = defaultdict(list)
    ids, config, histograms = set(), "", {}
    for path in sorted((model_folder(folder) / "sinks" / "wandb").glob("offline-run-*/*.wandb")):
        for data, _ in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                config += str(record.run.config)
        for row in history_rows(path):
            step = int(row["training_step"])
            for name, text in row.items():
                value = json.loads(text)
                if isinstance(value, (int, float)) and not name.startswith(("rollouts/", "_")):
                    curves[name].append((step, float(value)))
                if name == "data/reward_hist/values" and row["data/reward_hist/_type"] == '"histogram"':
                    histograms[step] = value
    return Seen(dict(curves), len(ids), config, histograms)


def see_mlflow(folder: Path) -> Seen:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("games")
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    curves = {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return Seen(curves, len(runs), str(run.data.params))


def see_tensorboard(folder: Path) -> Seen:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = model_folder(folder) / "sinks" / "tensorboard"
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    events.Reload()
    curves = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    histograms = {event.step: list(event.histogram_value.bucket) for event in events.Histograms("data/reward_hist")}
    return Seen(curves, 1, None, histograms)


def see_trackio(folder: Path) -> Seen:
    """Read a project with `trackio query`, as a user would."""
    import os

    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    rows = _trackio("SELECT run_name, step, metrics FROM metrics ORDER BY id", folder)
    curves: Curves = defaultdict(list)
    for row in rows:
        metrics = row["metrics"] if isinstance(row["metrics"], dict) else json.loads(row["metrics"])
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                curves[name].append((row["step"], float(value)))
    config = _trackio("SELECT * FROM configs", folder)
    return Seen(dict(curves), len({row["run_name"] for row in rows}), str(config))


def _trackio(sql: str, folder: Path) -> list[dict[str, Any]]:
    import subprocess
    import sys

    command = [sys.executable, "-m", "trackio.cli", "query", "project", "--project", "games", "--sql", sql, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout)["rows"])


READERS: dict[str, Callable[[Path], Seen]] = {
    "wandb": see_wandb, "mlflow": see_mlflow, "tensorboard": see_tensorboard, "trackio": see_trackio,
}  # fmt: skip
