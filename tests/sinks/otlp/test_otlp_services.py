"""Langfuse, Weave and Phoenix: addresses, keys, names of their own; Langfuse's scores."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto", reason="the extra `otlp` is not installed; `make test-sinks` installs it")

from art.errors import ConfigError, OverloadedError
from art.sinks import Refused
from art.sinks.otlp.langfuse import LangfuseSink
from art.sinks.otlp.phoenix import PhoenixSink
from art.sinks.otlp.sink import OtlpSink
from art.sinks.otlp.weave import WeaveSink
from art.trajectory import TrajectoryGroup
from tests.support.fake_langfuse import FakeLangfuse, fake_langfuse
from tests.support.logged_rollouts import SECRET, logged, run_in, tool_rollout
from tests.support.otlp_receiver import Answer, Receiver, serve

RUN = run_in(Path())


@pytest.fixture(params=[True, False], ids=["lists", "one by one"])
def langfuse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLangfuse]:
    with fake_langfuse("pk-1", "sk-1", takes_lists=request.param) as state:
        monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk-1")
        monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-1")
        monkeypatch.setenv("LANGFUSE_HOST", state.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=another")
        yield state


def started(sink: OtlpSink) -> OtlpSink:
    sink.start(RUN)
    return sink


def delivery(num: int = 2) -> Any:
    return logged([TrajectoryGroup([tool_rollout() for _ in range(num)])])


def test_langfuse_gets_traces_and_their_scores(langfuse: FakeLangfuse) -> None:
    sink = started(LangfuseSink(content=True))
    sink.groups(delivery())
    assert len(langfuse.rollouts) == 2
    root = langfuse.rollouts[0]
    assert root.attributes["langfuse.session.id"] == "shop/agent-1/train/3/0"
    assert root.attributes["langfuse.trace.tags"] == ["train", "step 3"]
    scores = {score["name"]: score for score in langfuse.scores.values() if score["traceId"] == root.trace_id}
    assert {name: score["value"] for name, score in scores.items()} == {
        "reward": 0.75, "ruler": 0.75, "ruler/brevity": 0.5,
    }  # fmt: skip
    assert scores["ruler"]["comment"] == f"it found the invoice, {SECRET}"
    assert scores["reward"]["timestamp"] == "2026-01-31T10:00:05+00:00"
    sink.groups(delivery())  # e.g. after a crash before the cursor was written
    assert len(langfuse.scores) == 6


def test_langfuse_gets_no_texts_unless_asked_for(langfuse: FakeLangfuse) -> None:
    started(LangfuseSink()).groups(delivery())
    assert len(langfuse.scores) == 6
    assert SECRET not in repr(langfuse.spans) + repr(langfuse.scores)


def test_a_busy_scores_api_does_not_repeat_the_traces(langfuse: FakeLangfuse) -> None:
    sink = started(LangfuseSink())
    langfuse.score_answers = [Answer(429, {"Retry-After": "30"})]
    with pytest.raises(OverloadedError) as caught:
        sink.groups(delivery())
    assert caught.value.retry_after_s == 30
    sink.groups(delivery())
    assert (len(langfuse.rollouts), len(langfuse.scores)) == (2, 6)


def test_a_rejected_score_is_counted_and_the_others_arrive(langfuse: FakeLangfuse) -> None:
    langfuse.rejects = "ruler/brevity"
    with pytest.raises(Refused, match="the score is not valid") as caught:
        started(LangfuseSink()).groups(delivery())
    assert caught.value.num_lost == 2
    assert len(langfuse.scores) == 4
    assert len(langfuse.rollouts) == 2


def test_scores_of_a_step_are_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_langfuse() as state:
        for key, value in (("PUBLIC_KEY", "pk"), ("SECRET_KEY", "sk"), ("BASE_URL", state.url)):
            monkeypatch.setenv(f"LANGFUSE_{key}", value)
        started(LangfuseSink()).groups(delivery(256))
        assert len(state.scores) == 768
        assert state.num_score_requests == 8


@pytest.mark.parametrize("sink", [LangfuseSink, WeaveSink])
def test_a_missing_key_is_named(sink: type[OtlpSink], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY", "WANDB_API_KEY", "WANDB_ENTITY"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(ConfigError, match="set"):
        sink().start(RUN)


def test_langfuses_cloud_is_the_default() -> None:
    settings = LangfuseSink().settings({"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk"}, RUN)
    assert settings.traces_url == "https://cloud.langfuse.com/api/public/otel/v1/traces"
    assert settings.headers["authorization"] == "Basic " + base64.b64encode(b"pk:sk").decode()
    assert "sk" not in repr(settings)


def test_weave_is_told_the_project() -> None:
    environment = {"WANDB_API_KEY": "key", "WANDB_ENTITY": "team", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://elsewhere"}
    settings = WeaveSink().settings(environment, RUN)
    assert settings.traces_url == "https://trace.wandb.ai/agents/otel/v1/traces"
    assert settings.headers == {"wandb-api-key": "key"}
    assert {settings.resource[f"wandb.{key}"] for key in ("entity", "project")} == {"team", "shop"}
    with pytest.raises(ConfigError, match="WANDB_ENTITY"):
        WeaveSink().settings({"WANDB_API_KEY": "key"}, RUN)


def test_phoenix_gets_a_project_of_the_same_name_and_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    state, annotations = Receiver({"authorization": "Bearer key", "x-more": "1"}), []

    def answer(path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if path == "/v1/span_annotations":
            assert headers["authorization"] == "Bearer key"
            annotations.extend(json.loads(body)["data"])
            return Answer(200, body=b'{"data": []}')
        return state.answer(path, headers, body)

    with serve(answer) as state.url:
        monkeypatch.setenv("PHOENIX_COLLECTOR_ENDPOINT", state.url)
        monkeypatch.setenv("PHOENIX_API_KEY", "key")
        monkeypatch.setenv("PHOENIX_CLIENT_HEADERS", "x-more=1")
        started(PhoenixSink()).groups(delivery())
    assert {span.resource["openinference.project.name"] for span in state.spans} == {"shop"}
    assert {one["span_id"] for one in annotations} == {span.span_id for span in state.rollouts}
    assert [(one["name"], one["result"]) for one in annotations[:3]] == [
        ("reward", {"score": 0.75}), ("ruler", {"score": 0.75}), ("ruler/brevity", {"score": 0.5}),
    ]  # fmt: skip


def test_scores_that_are_all_refused_are_given_up_soon(langfuse: FakeLangfuse) -> None:
    langfuse.score_answers = [Answer(400, body=b"no scores here")] * 1000
    with pytest.raises(Refused, match="no scores here") as caught:
        started(LangfuseSink()).groups(delivery(64))
    assert caught.value.num_lost == 192
    assert len(langfuse.rollouts) == 64
    assert langfuse.num_score_requests < 60
