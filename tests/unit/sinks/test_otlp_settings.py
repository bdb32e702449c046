"""The environment's variables: whether they choose the sink, and what cannot be honoured is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from art.errors import ConfigError
from art.metrics.delivery import choose_sinks
from art.sinks import Run
from art_trackers.otlp import OtlpSink, read_content

E = "OTEL_EXPORTER_OTLP_"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ENDPOINT": ""}, "OTEL_EXPORTER_OTLP_ENDPOINT is ''"),
        ({"ENDPOINT": "collector:4317"}, "expected one like http"),
        ({"PROTOCOL": "grpc"}, "sends http/protobuf only"),
        ({"TRACES_PROTOCOL": "http/json"}, "sends http/protobuf only"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp", reason="needs the extra `otlp`")
    for key, value in ({"ENDPOINT": "http://c"} | variables).items():
        monkeypatch.setenv(f"{E}{key}", value)
    with pytest.raises(ConfigError, match=said):
        OtlpSink().start(Run(project="p", name="m", folder=tmp_path))


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        (None, False), ("", False), ("false", False), ("NO_CONTENT", False), ("EVENT_ONLY", False),
        ("true", True), ("SPAN_ONLY", True), ("span_and_event", True),
    ],
)  # fmt: skip
def test_the_conventions_own_variable_asks_for_content(value: str | None, asked: bool) -> None:
    name = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
    assert read_content({} if value is None else {name: value}) is asked


def test_an_unknown_value_asks_for_nothing_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert read_content({"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "all of it"}) is False
    assert "expected one of" in caplog.text


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"agent-reinforcement-trainer\[otlp\]"):
        OtlpSink().start(Run(project="p", name="m", folder=tmp_path))


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, False),
        ({f"{E}ENDPOINT": "http://c"}, True),
        ({f"{E}TRACES_ENDPOINT": "http://c"}, True),
        ({f"{E}ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, False),
        ({f"{E}ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_environment_chooses_the_sink(environment: dict[str, str], chosen: bool) -> None:
    assert ("otlp" in [choice.name for choice in choose_sinks(None, environment)]) is chosen
