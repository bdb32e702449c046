"""Real collectors show each rollout once: after a run that was killed and resumed, and after a delivery sent twice.

They run if they are installed beside this Python, or in that of ART_MLFLOW_PYTHON or ART_PHOENIX_PYTHON.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp", reason="needs the extra `otlp`; `make test-sinks` installs it")

from tests.sinks.otlp.collectors import COLLECTORS, SeenTrace, collector, python_of
from tests.support.logged_rollouts import SECRET

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("traced_program.py")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=sorted(COLLECTORS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The name of a collector and its address."""
    name: str = request.param
    if (python := python_of(name)) is None:
        pytest.skip(f"{name} is not installed; `make test-sinks` installs it")
    with collector(name, python, tmp_path_factory.mktemp(name)) as url:
        yield name, url


def run(folder: Path, served: tuple[str, str], first: int, last: int, end: str, *, content: bool = True) -> None:
    name, url = served
    sink = "phoenix" if name == "phoenix" else "otlp"
    environment = COLLECTORS[name].environment(url) | {"PYTHONPATH": str(ROOT)}
    if content:
        environment["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "true"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), sink, str(first), str(last), end],
        env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == (-9 if end == "kill" else 0), done.stderr


def traces(served: tuple[str, str], num: int) -> dict[str, SeenTrace]:
    """The traces by conversation, once there are `num` of them."""
    name, url = served
    deadline = time.monotonic() + 30
    while True:
        seen = COLLECTORS[name].read(url)
        by_conversation = {trace.conversation: trace for trace in seen}
        if len(seen) >= num or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert len(seen) == len(by_conversation) == num
    return by_conversation


def test_a_user_sees_each_rollout_once(served: tuple[str, str], tmp_path: Path) -> None:
    run(tmp_path, served, 0, 2, "kill")
    run(tmp_path, served, 2, 4, "close")
    for cursor in tmp_path.glob("games/models/agent/sinks/*.jsonl"):
        cursor.unlink()  # as if nothing had been noted: all is sent once more
    run(tmp_path, served, 4, 5, "close")
    seen = traces(served, 11)
    for step in range(5):
        for index in range(2):
            trace = seen[f"games/agent/train/{step}/0/{index}"]
            assert [span.split(" ", 1)[1] for span in trace.spans if not span.startswith(("LLM", "CHAT_MODEL"))] == [
                "invoke_agent agent", "execute_tool search",
            ]  # fmt: skip
            assert len(trace.spans) == 4
            assert trace.spans[0].startswith("AGENT ")
            assert trace.duration_s == pytest.approx(5, abs=0.01)
            assert trace.num_tokens == 84
            assert trace.reward == 0.75
            if served[0] == "mlflow":
                assert trace.scores == {"reward": 0.75, "ruler": 0.75, "ruler/brevity": 0.5}
            assert all(
                f"{said}{SECRET}" in trace.messages for said in ("You help. ", "invoice 12: ", "I should search ")
            )
    assert seen["games/agent/train/0/0/2"].spans == ["AGENT invoke_agent agent"]  # the failed one


def test_a_user_sees_no_text_unless_it_was_asked_for(served: tuple[str, str], tmp_path: Path) -> None:
    run(tmp_path, served, 100, 101, "close", content=False)
    seen = [trace for key, trace in traces(served, 13).items() if "/train/100/" in key]
    assert len(seen) == 2
    for trace in seen:
        assert SECRET not in trace.text
        assert len(trace.spans) == 4
