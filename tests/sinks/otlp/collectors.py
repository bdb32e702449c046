"""A real collector of traces, MLflow's server, in a process of its own, and what a user of it would see, by its HTTP API."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.support.ports import free_port


@dataclass
class SeenTrace:
    """One trace as MLflow shows it."""

    spans: list[str]
    """Kind and name of each span, sorted, such as `AGENT invoke_agent x`."""
    duration_s: float
    conversation: str
    num_tokens: int
    reward: float | None
    scores: dict[str, float] = field(default_factory=dict)
    text: str = ""
    """Everything that it keeps."""
    messages: str = ""
    """Inputs and outputs in its own form, made of the conventions' attributes."""


def read_traces(url: str) -> list[SeenTrace]:
    asked = {
        "locations": [{"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": "0"}}],
        "max_results": 500,
    }
    found = httpx2.post(f"{url}/api/3.0/mlflow/traces/search", json=asked).raise_for_status().json().get("traces", [])
    return [_trace(url, trace) for trace in found]


def _trace(url: str, info: dict[str, Any]) -> SeenTrace:
    answer = httpx2.get(f"{url}/api/3.0/mlflow/traces/get", params={"trace_id": info["trace_id"]}).raise_for_status()
    spans = answer.json()["trace"]["spans"]
    attributes = [{pair["key"]: _plain(pair["value"]) for pair in span.get("attributes", [])} for span in spans]
    root = next(a for a, span in zip(attributes, spans, strict=True) if not span.get("parent_span_id"))
    kinds = [str(a.get("mlflow.spanType", "")).strip('"') for a in attributes]
    usage = info["trace_metadata"].get("mlflow.trace.tokenUsage", '{"total_tokens": 0}')
    return SeenTrace(
        spans=sorted(f"{kind} {span['name']}" for kind, span in zip(kinds, spans, strict=True)),
        duration_s=float(info.get("execution_duration", "0s").rstrip("s")),
        conversation=info["trace_metadata"]["mlflow.trace.session"],
        num_tokens=int(httpx2.Response(200, content=usage).json()["total_tokens"]),
        reward=None if "art.reward" not in root else float(root["art.reward"]),
        scores=_scores(spans),
        text=answer.text,
        messages=repr([a.get(f"mlflow.span{key}") for a in attributes for key in ("Inputs", "Outputs")]),
    )


def _scores(spans: list[dict[str, Any]]) -> dict[str, float]:
    events = [
        event for span in spans for event in span.get("events", []) if event["name"] == "gen_ai.evaluation.result"
    ]
    pairs = [{pair["key"]: _plain(pair["value"]) for pair in event["attributes"]} for event in events]
    return {
        str(one["gen_ai.evaluation.name"]).strip('"'): float(one["gen_ai.evaluation.score.value"]) for one in pairs
    }  # fmt: skip


def _plain(value: dict[str, Any]) -> Any:
    return next(iter(value.values()), None)


@contextmanager
def collector(folder: Path) -> Iterator[str]:
    """Run a server of MLflow until the block ends. Yields its address."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination", str(folder / "artefacts"), "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    variables = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not _is_up(url):
                assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
                assert time.monotonic() < deadline, f"{url} does not answer"
                time.sleep(0.2)
            yield url
        finally:
            os.killpg(process.pid, 15)
            process.wait(30)


def _is_up(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health").is_success
    except httpx2.HTTPError:
        return False
