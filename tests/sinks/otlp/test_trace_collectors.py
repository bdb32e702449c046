"""A real collector shows each rollout once: after a run that was killed and resumed, and after a delivery sent twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp", reason="needs the extra `otlp`; `make test-sinks` installs it")

pytest.importorskip("mlflow", reason="mlflow is not installed; `make test-sinks` installs it")

from tests.sinks.otlp.collectors import SeenTrace, collector, read_traces
from tests.support.logged_rollouts import SECRET

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("traced_program.py")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the collector."""
    with collector(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


def run(folder: Path, url: str, first: int, last: int, end: str, *, content: bool = True) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_HEADERS": "x-mlflow-experiment-id=0",
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": str(content).lower(), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(first), str(last), end],
        env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == (-9 if end == "kill" else 0), done.stderr


def traces(url: str, num: int) -> dict[str, SeenTrace]:
    """The traces by conversation, once there are `num` of them."""
    deadline = time.monotonic() + 30
    while True:
        seen = read_traces(url)
        by_conversation = {trace.conversation: trace for trace in seen}
        if len(seen) >= num or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert len(seen) == len(by_conversation) == num
    return by_conversation


def test_a_user_sees_each_rollout_once(served: str, tmp_path: Path) -> None:
    run(tmp_path, served, 0, 2, "kill")
    run(tmp_path, served, 2, 4, "close")
    for cursor in tmp_path.glob("games/models/agent/sinks/*.jsonl"):
        cursor.unlink()  # as if nothing had been noted: all is sent once more
    run(tmp_path, served, 4, 5, "close")
    seen = traces(served, 11)
    for step in range(5):
        for index in range(2):
            trace = seen[f"games/agent/train/{step}/0/{index}"]
            others = [span.split(" ", 1)[1] for span in trace.spans if not span.startswith("CHAT_MODEL")]
            assert others == ["invoke_agent agent"]
            assert len(trace.spans) == 3
            assert trace.spans[0].startswith("AGENT ")
            assert trace.duration_s == pytest.approx(5, abs=0.01)
            assert trace.num_tokens == 84
            assert trace.reward == 0.75
            assert trace.scores == {"reward": 0.75, "ruler": 0.75, "ruler/brevity": 0.5}
            assert all(
                f"{said}{SECRET}" in trace.messages for said in ("You help. ", "invoice 12: ", "I should search ")
            )
    assert seen["games/agent/train/0/0/2"].spans == ["AGENT invoke_agent agent"]  # the failed one


def test_a_user_sees_no_text_unless_it_was_asked_for(served: str, tmp_path: Path) -> None:
    run(tmp_path, served, 100, 101, "close", content=False)
    seen = [trace for key, trace in traces(served, 13).items() if "/train/100/" in key]
    assert len(seen) == 2
    for trace in seen:
        assert SECRET not in trace.text
        assert len(trace.spans) == 3
