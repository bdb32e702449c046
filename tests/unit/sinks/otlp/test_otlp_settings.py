"""OpenTelemetry's environment variables mean here what they mean elsewhere, or are refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from art.errors import ConfigError
from art.sinks import Run
from art.sinks.kinds import KINDS
from art.sinks.otlp.settings import read_content, read_settings
from art.sinks.otlp.sink import OtlpSink

E = "OTEL_EXPORTER_OTLP_"


def test_the_path_is_added_to_the_general_address_only() -> None:
    assert read_settings({f"{E}ENDPOINT": "http://c:4318/"}).traces_url == "http://c:4318/v1/traces"
    assert read_settings({f"{E}ENDPOINT": "http://c/base"}).traces_url == "http://c/base/v1/traces"
    own = read_settings({f"{E}ENDPOINT": "http://c", f"{E}TRACES_ENDPOINT": "https://t/x"})
    assert (own.traces_url, own.metrics_url) == ("https://t/x", None)


def test_headers_and_resource_are_decoded() -> None:
    settings = read_settings(
        {
            f"{E}ENDPOINT": "http://c",
            f"{E}HEADERS": "Authorization=Basic%20YQ==, x-a=1,",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=dev,service.name=x",
            "OTEL_SERVICE_NAME": "trainer",
        }
    )
    assert settings.headers == {"authorization": "Basic YQ==", "x-a": "1"}
    assert settings.resource == {"deployment.environment": "dev", "service.name": "trainer"}
    own = read_settings({f"{E}ENDPOINT": "http://c", f"{E}HEADERS": "a=1", f"{E}TRACES_HEADERS": "b=2"})
    assert own.headers == {"b": "2"}
    assert own.metrics_headers == {"a": "1"}


def test_a_services_own_keys_are_not_mixed_with_others() -> None:
    environment = {
        f"{E}ENDPOINT": "http://c",
        f"{E}HEADERS": "authorization=theirs",
        f"{E}METRICS_ENDPOINT": "http://m",
    }
    settings = read_settings(environment, traces_url="https://service/v1/traces", headers={"authorization": "ours"})
    assert settings.traces_url == "https://service/v1/traces"
    assert settings.headers == {"authorization": "ours"}
    assert settings.metrics_url is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ENDPOINT": ""}, "set OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"ENDPOINT": "collector:4317"}, "expected an address like http"),
        ({"PROTOCOL": "grpc"}, "sends http/protobuf only"),
        ({"TRACES_PROTOCOL": "http/json"}, "sends http/protobuf only"),
        ({"COMPRESSION": "zstd"}, "expected gzip or none"),
        ({"TIMEOUT": "soon"}, "expected seconds above 0"),
        ({"TIMEOUT": "-1"}, "expected seconds above 0"),
        ({"TRACES_HEADERS": "a=1,hunter2"}, "at place 2; expected key=value"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_settings({f"{E}{key}": value for key, value in ({"ENDPOINT": "http://c"} | variables).items()})
    assert "hunter2" not in str(caught.value)


def test_a_key_with_a_line_break_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="the header 'authorization' has characters") as caught:
        read_settings({f"{E}ENDPOINT": "http://c", f"{E}HEADERS": "authorization=hunter2%0A"})
    assert "hunter2" not in str(caught.value)


def test_a_timeout_is_bounded() -> None:
    assert read_settings({f"{E}ENDPOINT": "http://c", f"{E}TIMEOUT": "10000"}).timeout_s == 120
    assert read_settings({f"{E}ENDPOINT": "http://c"}).timeout_s == 10


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
    monkeypatch.setitem(sys.modules, "art.sinks.otlp.wire", None)
    monkeypatch.delattr("art.sinks.otlp.wire", raising=False)
    with pytest.raises(ConfigError, match=r"agent-reinforcement-trainer\[otlp\]"):
        OtlpSink().start(Run(project="p", name="m", folder=tmp_path))


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, set()),
        ({f"{E}ENDPOINT": "http://c"}, {"otlp"}),
        ({f"{E}TRACES_ENDPOINT": "http://c"}, {"otlp"}),
        ({f"{E}ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, set()),
        ({f"{E}ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, set()),
        ({"LANGFUSE_PUBLIC_KEY": "a", "LANGFUSE_SECRET_KEY": "b"}, {"langfuse"}),
        ({"LANGFUSE_PUBLIC_KEY": "a"}, set()),
        ({"LANGFUSE_PUBLIC_KEY": "a", "LANGFUSE_SECRET_KEY": "b", "LANGFUSE_TRACING_ENABLED": "False"}, set()),
        ({"PHOENIX_COLLECTOR_ENDPOINT": "http://p"}, {"phoenix"}),
        ({"WANDB_API_KEY": "k", "WANDB_ENTITY": "e"}, set()),
    ],
)
def test_the_environment_chooses_services(environment: dict[str, str], chosen: set[str]) -> None:
    names = ("otlp", "langfuse", "weave", "phoenix")
    assert {name for name in names if KINDS[name].is_on(environment)} == chosen
