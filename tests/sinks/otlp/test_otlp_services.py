"""Langfuse, Weave and Phoenix: addresses, keys, names of their own."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp", reason="needs the extra `otlp`; `make test-sinks` installs it")

from art.errors import ConfigError
from art.sinks.otlp import LangfuseSink, OtlpSink, PhoenixSink, WeaveSink
from art.trajectory import TrajectoryGroup
from tests.support.logged_rollouts import logged, run_in, tool_rollout
from tests.support.otlp_receiver import Receiver, serve

RUN = run_in(Path())


def received(sink: OtlpSink, address: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Receiver:
    """What a service with keys of its own gets, beside a collector's headers that are none of its business."""
    state = Receiver(headers)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=another,x-collector=secret")
    with serve(lambda path, headers, body: state.answer("/v1/traces", headers, body)) as url:
        monkeypatch.setenv(address, url)
        sink.start(RUN)
        sink.groups(logged([TrajectoryGroup([tool_rollout(), tool_rollout()])]))
        sink.close(1)
    assert len(state.rollouts) == 2
    assert not any("x-collector" in headers for _, headers, _ in state.requests)
    return state


def test_langfuse_gets_sessions_and_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk-1")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-1")
    key = {"authorization": "Basic " + base64.b64encode(b"pk-1:sk-1").decode(), "x-langfuse-ingestion-version": "4"}
    root = received(LangfuseSink(), "LANGFUSE_HOST", key, monkeypatch).rollouts[0]
    assert root.attributes["langfuse.session.id"] == "shop/agent-1/train/3/0"
    assert root.attributes["langfuse.trace.tags"] == ["train", "step 3"]


def test_phoenix_gets_a_project_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOENIX_API_KEY", "key")
    monkeypatch.setenv("PHOENIX_CLIENT_HEADERS", "x-more=1")
    headers = {"authorization": "Bearer key", "x-more": "1"}
    state = received(PhoenixSink(), "PHOENIX_COLLECTOR_ENDPOINT", headers, monkeypatch)
    assert {span.resource["openinference.project.name"] for span in state.spans} == {"shop"}


def test_weave_is_told_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    state = received(WeaveSink(), "WF_TRACE_SERVER_URL", {"wandb-api-key": "key"}, monkeypatch)
    assert {(span.resource["wandb.entity"], span.resource["wandb.project"]) for span in state.spans} == {
        ("team", "shop")
    }


@pytest.mark.parametrize("sink", [LangfuseSink, WeaveSink])
def test_a_missing_key_is_named(sink: type[OtlpSink], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY", "WANDB_API_KEY", "WANDB_ENTITY"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(ConfigError, match="set"):
        sink().start(RUN)


def test_the_clouds_are_the_defaults() -> None:
    langfuse = LangfuseSink().service({"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "hidden"}, RUN)
    assert langfuse.endpoint == "https://cloud.langfuse.com/api/public/otel/v1/traces"
    assert "hidden" not in repr(langfuse)
    weave = WeaveSink().service({"WANDB_API_KEY": "key", "WANDB_ENTITY": "team"}, RUN)
    assert weave.endpoint == "https://trace.wandb.ai/agents/otel/v1/traces"
