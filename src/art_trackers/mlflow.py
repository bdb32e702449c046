"""MLflow: metrics by step.

A metric has the time at which its row was logged, so MLflow's SQL store recognises a point that it has already.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import time
from collections.abc import Mapping
from typing import Any

from art.errors import ConfigError
from art.sinks import Refused, Row, Run, Sink

RUN_TAG, ROWS_TAG = "art.run", "art.rows"
"""Tags of a run in MLflow: the run's id in ART, and the number of rows that were sent."""
_PER_REQUEST = 1000
"""Most metrics that MLflow takes in a request."""
_MAX_PARAM = 6000
"""Longest value of a parameter that MLflow takes, in characters."""
_FORBIDDEN = re.compile(r"[^/\w.\- ]")


class MlflowSink(Sink):
    """Reports to the server or store of `MLFLOW_TRACKING_URI`, as the experiment `MLFLOW_EXPERIMENT_NAME`.

    By default the experiment is the model's project, and the run the model.
    """

    name = "mlflow"
    package, extra = "mlflow", "mlflow"
    environment = ("MLFLOW_TRACKING_URI",)

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def start(self, run: Run) -> int | None:
        # Requests are repeated after pauses anyway. MLflow's own seven tries would hold up `register` for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        import mlflow
        from mlflow.exceptions import MlflowException

        uri = mlflow.get_tracking_uri()
        try:
            self._client = mlflow.MlflowClient(uri)
            client, name = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
            experiment = client.get_experiment_by_name(name)
            experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
            of_run = f"tags.`{RUN_TAG}` = '{run.id}'"
            known = client.search_runs([experiment_id], of_run, max_results=1, order_by=["attributes.start_time ASC"])
            opened = known[0] if known else client.create_run(experiment_id, run_name=run.name, tags={RUN_TAG: run.id})
            if known:
                client.update_run(opened.info.run_id, status="RUNNING")
        except MlflowException as error:
            raise ConfigError(
                f"MLflow at {uri} did not open the run {run.project}/{run.name}: {error}. Check MLFLOW_TRACKING_URI "
                "and its keys, or leave 'mlflow' out of `report_metrics`"
            ) from error
        self._run_id = opened.info.run_id
        self.configure(run.config)
        return int(opened.data.tags.get(ROWS_TAG, 0))

    def configure(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params  # MLflow does not let a parameter change
        params = [Param(name, value) for name, value in flat_params(config).items() if name not in known]
        for start in range(0, len(params), 100):
            self._call("log_batch", params=params[start : start + 100])

    def metrics(self, row: Row) -> None:
        from mlflow.entities import Metric, RunTag

        at_ms = int(row.recorded_at.timestamp() * 1000)
        metrics = [Metric(metric_name(name), value, at_ms, row.step) for name, value in row.metrics.items()]
        pieces = [metrics[start : start + _PER_REQUEST] for start in range(0, len(metrics), _PER_REQUEST)] or [[]]
        for piece in pieces:
            # The tag counts the row once its last piece is there.
            tags = [RunTag(ROWS_TAG, str(row.number + 1))] if piece is pieces[-1] else []
            self._call("log_batch", metrics=piece, tags=tags)

    def close(self, timeout_s: float) -> None:
        self._client.set_terminated(self._run_id, "FINISHED", int(time.time() * 1000))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the client for this run.

        Raises:
            Refused: MLflow does not accept what is sent, and never will.
        """
        from mlflow.exceptions import MlflowException

        try:
            getattr(self._client, method)(self._run_id, *args, **kwargs)
        except MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                raise Refused(str(error)) from error
            raise


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts: other characters become `_`, and the name must not read as another path."""
    name = _FORBIDDEN.sub("_", name)[:250]
    return name if posixpath.normpath(name) == name and not name.startswith(("/", "..")) else name.replace("/", "_")


def flat_params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested config as parameters with dotted names, such as `settings.lora.rank`."""
    params: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            params |= flat_params(value, f"{name}.")
        elif value is not None:
            params[metric_name(name)] = (value if isinstance(value, str) else json.dumps(value))[:_MAX_PARAM]
    return params
