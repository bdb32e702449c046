"""Traces arrive at a strict receiver: once each, after any failure, and nothing of them before it is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp", reason="needs the extra `otlp`; `make test-sinks` installs it")

import art
from art.errors import ConfigError
from art.metrics import delivery
from art.sinks import LoggedGroups, Refused
from art.trajectory import Trajectory, TrajectoryGroup
from art_trackers import otlp as sink_module
from art_trackers.otlp import OtlpSink
from tests.support.genai_conventions import OPT_IN, check_event, check_span
from tests.support.logged_rollouts import BEGAN, SECRET, answer, failure, logged, run_in, tool_rollout
from tests.support.otlp_receiver import Answer, Receiver, partial_success, receiver
from tests.support.ports import free_port


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiver(x_team="a b") as state:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", state.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "X-Team=a%20b")
        yield state


@pytest.fixture
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that do not wait long after a failure."""
    for name, seconds in {
        "POLL_S": 0.02,
        "FIRST_PAUSE_S": 0.02,
        "LONGEST_PAUSE_S": 0.05,
        "CLOSING_PAUSE_S": 0.02,
    }.items():
        monkeypatch.setattr(delivery, name, seconds)


def started(tmp_path: Path, **options: Any) -> OtlpSink:
    sink = OtlpSink(**options)
    sink.start(run_in(tmp_path))
    return sink


def groups(num: int = 1, size: int = 2) -> LoggedGroups:
    return logged([TrajectoryGroup([tool_rollout() for _ in range(size)]) for _ in range(num)])


def wait_until(is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_each_rollout_arrives_as_a_trace(collector: Receiver, tmp_path: Path) -> None:
    sink = started(tmp_path)
    sink.groups(logged([TrajectoryGroup([tool_rollout(), tool_rollout()], exceptions=[failure()])]))
    sink.close(1)
    assert len(collector.rollouts) == len({span.trace_id for span in collector.spans}) == 3
    for span in collector.spans:
        check_span(span.name, span.kind, span.attributes)
        assert span.resource["service.name"] == "art"
    for span in collector.rollouts[:2]:
        assert span.attributes["art.reward"] == 0.75
        for name, at, attributes in span.events:
            check_event(name, attributes)
            assert at == span.end
    failed = collector.rollouts[2]
    assert (failed.status, failed.attributes["error.type"]) == (2, "TimeoutError")
    assert failed.start == failed.end == collector.rollouts[0].end
    assert {size for path, _, size in collector.requests if path == "/v1/traces"}


def test_nothing_of_the_content_leaves_unless_asked_for(
    collector: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(tmp_path).groups(logged([TrajectoryGroup([tool_rollout()], exceptions=[failure()])]))
    assert SECRET not in repr(collector.spans)
    collector.spans.clear()
    started(tmp_path, content=True).groups(groups())
    assert SECRET in repr(collector.spans)
    assert OPT_IN - {"gen_ai.system_instructions"} <= {key for span in collector.spans for key in span.attributes}
    collector.spans.clear()
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    started(tmp_path, content=False).groups(groups())
    assert SECRET not in repr(collector.spans)
    started(tmp_path).groups(groups())
    assert SECRET in repr(collector.spans)


def test_half_characters_and_markup_arrive_as_text(collector: Receiver, tmp_path: Path) -> None:
    evil = "\ud800<script>alert(1)</script>\0"
    trajectory = Trajectory(
        messages_and_choices=[{"role": "user", "content": evil}], metadata={"scenario_id": evil, "big": 2**80},
        metrics={evil: 1.0},
    )  # fmt: skip
    sink = started(tmp_path, content=True)
    sink.groups(LoggedGroups(split="train", step=0, first=0, groups=[TrajectoryGroup([trajectory])]))
    attributes = collector.rollouts[0].attributes
    assert attributes["art.scenario_id"] == "?<script>alert(1)</script>\0"
    assert attributes["art.metadata.big"] == str(2**80)


async def test_a_resumed_run_sends_each_rollout_once(collector: Receiver, tmp_path: Path, quick_pauses: None) -> None:
    def model() -> art.Model[Any, Any]:
        return art.Model(
            name="m", project="p", base_path=str(tmp_path), report_metrics=["otlp"],
            inference_base_url="http://localhost/v1", inference_api_key="x",
        )  # fmt: skip

    first = model()
    await first.log([TrajectoryGroup([tool_rollout()])], split="train", step=1)
    await first.close()
    second = model()
    await second.log([TrajectoryGroup([tool_rollout()])], split="train", step=1)
    await second.log([TrajectoryGroup([tool_rollout()])], split="val", step=2)
    await second.close()
    places = [tuple(span.attributes[f"art.{key}"] for key in ("split", "step", "group")) for span in collector.rollouts]
    assert places == [("train", 1, 0), ("train", 1, 1), ("val", 2, 0)]
    assert len({(span.trace_id, span.span_id) for span in collector.spans}) == len(collector.spans) == 9


async def test_a_collector_that_goes_away_and_comes_back_gets_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_pauses: None
) -> None:
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    model = art.Model[Any, Any](
        name="m", project="p", base_path=str(tmp_path), report_metrics=["otlp"],
        inference_base_url="http://localhost/v1", inference_api_key="x",
    )  # fmt: skip
    with receiver(port) as before:
        await model.log([TrajectoryGroup([tool_rollout()])], split="train", step=1)
        await asyncio.to_thread(wait_until, lambda: len(before.rollouts) == 1)
    await model.log([TrajectoryGroup([tool_rollout()])], split="train", step=2)
    await asyncio.sleep(0.2)
    with receiver(port) as after:
        await asyncio.to_thread(wait_until, lambda: len(after.rollouts) == 1)
        await model.close()
    assert after.rollouts[0].attributes["art.step"] == 2
    assert len(after.spans) == 3


def test_a_busy_collector_is_left_alone_for_as_long_as_it_asks(
    collector: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = started(tmp_path)
    collector.answers = [Answer(503, {"Retry-After": "0"}), Answer(429, {"Retry-After": "30"})]
    with pytest.raises(art.errors.OverloadedError) as caught:
        sink.groups(groups())
    assert caught.value.retry_after_s == 30
    sink.groups(groups())
    assert len(collector.spans) == 6


def test_the_rest_of_a_partial_success_is_not_repeated(collector: Receiver, tmp_path: Path) -> None:
    sink = started(tmp_path)
    collector.answers = [partial_success(1, "one span is odd")]
    sink.groups(groups())
    assert len(collector.rollouts) == 2


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_a_refused_request_is_lost_and_the_others_arrive(
    collector: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(sink_module, "MAX_REQUEST_BYTES", 1)
    sink = started(tmp_path)
    collector.answers = [Answer(status, body=b"\x1b[31mno \x00spans\n" * 500)]
    with pytest.raises(Refused, match=rf"answered {status}: \[31mno spans") as caught:
        sink.groups(groups(num=2, size=3))
    assert len(collector.rollouts) == 5
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()
    sink.groups(groups())  # the next delivery is not concerned
    assert len(collector.rollouts) == 7


def test_a_rollout_larger_than_a_request_is_sent_in_several(
    collector: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "MAX_REQUEST_BYTES", 50_000)
    turns = [answer("x" * 1000, at=(i, i + 1), exchange_id=f"ex_{i}") for i in range(30)]
    trajectory = Trajectory(messages_and_choices=turns, start_time=BEGAN)
    started(tmp_path, content=True).groups(logged([TrajectoryGroup([trajectory, tool_rollout()])]))
    assert [span.name for span in collector.spans].count("chat shop/agent-1") == 32
    assert len({(span.trace_id, span.span_id) for span in collector.spans}) == len(collector.spans)
    assert len({span.trace_id for span in collector.spans}) == 2
    sizes = [size for _, _, size in collector.requests[1:]]
    assert len(sizes) > 8
    assert max(sizes) < 52_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_HEADERS": ""}, "answered 401: a header is missing. Check the address and the key"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "{url}/other"}, "answered 404"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ],
)
def test_a_collector_that_is_not_there_fails_the_start(
    collector: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str
) -> None:
    for key, value in ({"OTEL_EXPORTER_OTLP_TIMEOUT": "0.5"} | change).items():
        monkeypatch.setenv(key, value.format(url=collector.url))
    with pytest.raises(ConfigError, match=said):
        started(tmp_path)


def test_a_delivery_of_many_is_a_few_requests(collector: Receiver, tmp_path: Path) -> None:
    """256 rollouts of a step are sent in a few requests."""
    started(tmp_path).groups(groups(num=32, size=8))
    assert len(collector.rollouts) == 256
    assert len(collector.requests) <= 4
