"""Real collectors of traces, each in a process of its own, and what a user of each would see, by its HTTP API."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.support.ports import free_port


@dataclass
class SeenTrace:
    """One trace as a collector shows it."""

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


@dataclass(frozen=True)
class CollectorKind:
    module: str
    """What is imported if the collector is installed."""
    command: Callable[[Path, int], list[str]]
    health: str
    environment: Callable[[str], dict[str, str]]
    """Variables of the program that reports, for the collector's address."""
    read: Callable[[str], list[SeenTrace]]
    server_environment: Mapping[str, str] = field(default_factory=dict)


def read_mlflow(url: str) -> list[SeenTrace]:
    asked = {
        "locations": [{"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": "0"}}],
        "max_results": 500,
    }
    found = httpx2.post(f"{url}/api/3.0/mlflow/traces/search", json=asked).raise_for_status().json().get("traces", [])
    return [_mlflow_trace(url, trace) for trace in found]


def _mlflow_trace(url: str, info: dict[str, Any]) -> SeenTrace:
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


def read_phoenix(url: str) -> list[SeenTrace]:
    spans: list[dict[str, Any]] = []
    asked: dict[str, Any] = {"limit": 1000}
    while True:
        answer = httpx2.get(f"{url}/v1/projects/games/spans", params=asked)
        if answer.status_code == 404:  # the project is made with its first span
            return []
        spans += answer.raise_for_status().json()["data"]
        if (cursor := answer.json().get("next_cursor")) is None:
            break
        asked["cursor"] = cursor
    traces: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        traces.setdefault(span["context"]["trace_id"], []).append(span)
    return [_phoenix_trace(of) for of in traces.values() if any(span["parent_id"] is None for span in of)]


def _phoenix_trace(spans: list[dict[str, Any]]) -> SeenTrace:
    root = next(span for span in spans if span["parent_id"] is None)
    tokens = [span["attributes"].get("llm.token_count.total", 0) for span in spans]
    times = [_seconds(root[key]) for key in ("start_time", "end_time")]
    return SeenTrace(
        spans=sorted(f"{span['span_kind']} {span['name']}" for span in spans), duration_s=times[1] - times[0],
        conversation=root["attributes"]["session.id"], num_tokens=sum(tokens),
        reward=root["attributes"].get("art.reward"), text=repr(spans),
        messages=repr([value for span in spans for key, value in span["attributes"].items() if ".message." in key]),
    )  # fmt: skip


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def _mlflow_command(folder: Path, port: int) -> list[str]:
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artefacts"),
    ]
    return ["-m", "mlflow", "server", *store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]


COLLECTORS = {
    "mlflow": CollectorKind(
        module="mlflow",
        command=_mlflow_command,
        health="/health",
        environment=lambda url: {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_HEADERS": "x-mlflow-experiment-id=0",
        },
        read=read_mlflow,
        server_environment={"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
    ),
    "phoenix": CollectorKind(
        module="phoenix.server.main",
        command=lambda folder, port: ["-m", "phoenix.server.main", "serve"],
        health="/healthz",
        environment=lambda url: {"PHOENIX_COLLECTOR_ENDPOINT": url},
        read=read_phoenix,
        server_environment={"PHOENIX_TELEMETRY_ENABLED": "false", "PHOENIX_HOST": "127.0.0.1"},
    ),
}  # fmt: skip


def python_of(name: str) -> str | None:
    """The Python that has a collector: this one, or that of a variable such as ART_PHOENIX_PYTHON."""
    python = os.environ.get(f"ART_{name.upper()}_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", f"import {COLLECTORS[name].module}"], capture_output=True, check=False)
    return python if found.returncode == 0 else None


@contextmanager
def collector(name: str, python: str, folder: Path) -> Iterator[str]:
    """Run a collector until the block ends. Yields its address."""
    kind, (port, grpc_port) = COLLECTORS[name], _free_ports()
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"PHOENIX_PORT": str(port), "PHOENIX_GRPC_PORT": str(grpc_port), "PHOENIX_WORKING_DIR": str(folder)}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [python, *kind.command(folder, port)], env=os.environ | kind.server_environment | variables, stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url + kind.health, process, folder / "log.txt")
            yield url
        finally:
            os.killpg(process.pid, 15)
            process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            if httpx2.get(url).is_success:
                return
        except httpx2.HTTPError:
            pass
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, f"{url} does not answer"
        time.sleep(0.2)


def _free_ports() -> tuple[int, int]:
    return free_port(), free_port()
