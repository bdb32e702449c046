"""Rollouts as spans: what the conventions require, ids that a repeated delivery shares, times, and hostile logs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otlp` is not installed; `make test-sinks` installs it")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from art.trajectory import Trajectory
from art_trackers.otlp_spans import RolloutPlace, SpanSettings, failed_span, rollout_spans
from tests.support.genai_conventions import CLIENT, INTERNAL, OPT_IN, check_event, check_span
from tests.support.logged_rollouts import (
    SECRET,
    T0,
    answer,
    call,
    failure,
    forked_rollout,
    run_in,
    tool_rollout,
)

PLACE = RolloutPlace(run_in(Path()), "train", 3, 1, 2)
NO_TEXTS, TEXTS = SpanSettings(), SpanSettings(content=True)


def traced(
    trajectory: Trajectory, settings: SpanSettings = NO_TEXTS, place: RolloutPlace = PLACE
) -> list[ReadableSpan]:
    return rollout_spans(Trajectory.model_validate_json(trajectory.model_dump_json()), place, settings)


def attributes(span: Any) -> dict[str, Any]:
    return dict(span.attributes or {})


def named(trace: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in trace if span.name == name]


def times_of(trace: list[ReadableSpan]) -> list[list[float]]:
    """Start and end of each span, in seconds after the rollout's beginning."""
    return [[round((at or 0) / 1e9 - T0, 3) for at in (span.start_time, span.end_time)] for span in trace]


def evaluations(trace: list[ReadableSpan]) -> dict[str, float]:
    events = [attributes(event) for event in trace[0].events]
    return {event["gen_ai.evaluation.name"]: event["gen_ai.evaluation.score.value"] for event in events}


def everything(trace: list[ReadableSpan]) -> str:
    return "".join(span.to_json() for span in trace)


def check(trace: list[ReadableSpan]) -> None:
    for span in trace:
        check_span(span.name, CLIENT if span.kind is SpanKind.CLIENT else INTERNAL, attributes(span))
        for event in span.events:
            check_event(event.name, attributes(event))


def test_a_rollout_is_a_trace_with_its_requests() -> None:
    trace = traced(tool_rollout())
    check(trace)
    assert [span.name for span in trace] == ["invoke_agent agent-1", "chat shop/agent-1", "chat shop/agent-1"]
    assert {span.context.trace_id for span in trace} == {trace[0].context.trace_id}
    assert len({span.context.span_id for span in trace}) == 3
    assert [span.parent for span in trace] == [None] + [trace[0].context] * 2
    root = attributes(trace[0])
    assert root["gen_ai.conversation.id"] == "shop/agent-1/train/3/1/2"
    assert root["gen_ai.agent.version"] == "7"
    assert (root["art.reward"], root["art.outcome"], root["art.scenario_id"]) == (0.75, "ok", "s-3")
    assert root["art.metrics.num_turns"] == 2
    first = attributes(named(trace, "chat shop/agent-1")[0])
    assert first["gen_ai.response.model"] == "shop/agent-1@7"
    assert first["gen_ai.response.id"] == "ex_1"
    assert first["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert (first["gen_ai.usage.input_tokens"], first["gen_ai.usage.output_tokens"]) == (30, 12)


def test_times_are_those_of_the_record_and_others_are_marked() -> None:
    trace = traced(tool_rollout())
    assert times_of(trace) == [[0, 5], [0.5, 1.5], [2.0, 4.0]]
    assert [attributes(span).get("art.time.estimated", False) for span in trace] == [False, False, False]


def test_answers_without_times_have_those_of_their_rollout() -> None:
    items: list[Any] = [
        {"role": "user", "content": "?"},
        answer("a"),
        answer("b"),
        answer("c", at=(4, 5), exchange_id="ex"),
    ]
    trace = traced(Trajectory(messages_and_choices=items, start_time=tool_rollout().start_time))
    assert times_of(trace) == [[0, 5], [0, 5], [0, 5], [4, 5]]
    assert [attributes(span).get("art.time.estimated", False) for span in trace] == [True, True, True, False]
    assert attributes(trace[1])["gen_ai.provider.name"] == "openai"
    assert trace[1].name == "chat agent-1"
    assert attributes(trace[3])["gen_ai.provider.name"] == "art"


def test_the_reward_and_each_judges_score_are_evaluation_events() -> None:
    trace = traced(tool_rollout(), TEXTS)
    events = trace[0].events
    assert evaluations(trace) == {"reward": 0.75, "ruler": 0.75, "ruler/brevity": 0.5}
    assert attributes(events[1])["gen_ai.evaluation.explanation"] == f"it found the invoice, {SECRET}"
    assert events[0].timestamp == pytest.approx((T0 + 5) * 1e9)


def test_a_score_that_no_judge_gave_is_no_evaluation() -> None:
    trajectory = tool_rollout()
    trajectory.metrics |= {"game_score": 3.0, "tests/passed": 2.0}
    assert list(evaluations(traced(trajectory))) == ["reward", "ruler", "ruler/brevity"]
    trace = traced(Trajectory(messages_and_choices=[], reward=math.nan, metrics={"game_score": 3.0}))
    assert evaluations(trace) == {}
    assert attributes(trace[0])["art.metrics.game_score"] == 3.0


def test_turn_rewards_are_events_of_their_requests() -> None:
    trace = traced(tool_rollout(turn_rewards=[0.25, -1.0]))
    events = [attributes(span.events[0]) for span in named(trace, "chat shop/agent-1")]
    assert [event["gen_ai.evaluation.score.value"] for event in events] == [0.25, -1.0]
    assert [event["gen_ai.response.id"] for event in events] == ["ex_1", "ex_2"]


def test_no_text_is_sent_unless_asked_for() -> None:
    without, with_texts = traced(tool_rollout()), traced(tool_rollout(), TEXTS)
    assert SECRET not in everything(without)
    assert not any(OPT_IN & attributes(span).keys() for span in without)
    assert SECRET not in everything([failed_span(failure(), PLACE, T0, SpanSettings())])
    assert everything(with_texts).count(SECRET) > 8


def test_texts_follow_the_conventions_schemas() -> None:
    trace = traced(tool_rollout(), TEXTS)
    check(trace)
    chat = attributes(named(trace, "chat shop/agent-1")[1])
    messages = json.loads(str(chat["gen_ai.input.messages"]))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    reasoning, asked = messages[2]["parts"]
    assert (reasoning["type"], asked["name"], asked["arguments"]) == ("reasoning", "search", {"query": "invoice"})
    assert messages[3]["parts"] == [{"type": "tool_call_response", "id": "call_1", "response": f"invoice 12: {SECRET}"}]
    written = json.loads(str(chat["gen_ai.output.messages"]))
    assert written[0]["finish_reason"] == "stop"
    assert json.loads(str(chat["gen_ai.tool.definitions"]))[0]["parameters"]["type"] == "object"
    assert attributes(trace[0])["art.metadata.question"] == SECRET


def test_long_conversations_keep_their_newest_messages_and_valid_json() -> None:
    items: list[Any] = [{"role": "user", "content": f"{i} " + "x" * 900} for i in range(50)] + [answer("y" * 9000)]
    trace = traced(Trajectory(messages_and_choices=items), SpanSettings(content=True, max_characters=4000))
    check(trace)
    chat = attributes(trace[1])
    messages = json.loads(str(chat["gen_ai.input.messages"]))
    assert messages[-1]["parts"][0]["content"].startswith("49 ")
    assert messages[0]["parts"] == [{"type": "art.left_out", "messages": 50 - len(messages) + 1}]
    assert len(str(chat["gen_ai.input.messages"])) < 5000
    assert "characters left out" in json.loads(str(chat["gen_ai.output.messages"]))[0]["parts"][0]["content"]


def test_a_repeated_delivery_has_the_same_ids_and_another_rollout_has_others() -> None:
    ids = [[span.context.span_id for span in traced(tool_rollout())] for _ in range(2)]
    assert ids[0] == ids[1]
    places = [
        PLACE,
        replace(PLACE, split="val"),
        replace(PLACE, step=4),
        replace(PLACE, group=0),
        replace(PLACE, index=0),
    ]
    places.append(replace(PLACE, run=run_in(Path(), name="agent-2")))
    traces = [traced(tool_rollout(), place=place) for place in places]
    later = tool_rollout()
    later.start_time = later.start_time.replace(year=2027)  # a log that was removed and began again
    assert len({trace[0].context.trace_id for trace in [*traces, traced(later)]}) == 7


def test_an_answer_that_two_conversations_share_is_one_span() -> None:
    trace = traced(forked_rollout())
    chats = [(attributes(span)["gen_ai.response.id"], attributes(span)["art.history"]) for span in trace[1:]]
    assert chats == [("ex_a", 0), ("ex_b", 0), ("ex_c", 1)]


def test_the_rollouts_own_id_is_the_conversation() -> None:
    trace = traced(tool_rollout().model_copy(update={"metadata": {"rollout_id": "capture-12"}}))
    assert {attributes(span)["gen_ai.conversation.id"] for span in trace} == {"capture-12"}


def test_a_failed_rollout_is_a_trace_with_an_error() -> None:
    span = failed_span(failure(), PLACE, T0, TEXTS)
    check_span(span.name, INTERNAL, attributes(span))
    assert (span.status.description, attributes(span)["error.type"]) == ("TimeoutError", "TimeoutError")
    assert attributes(span)["art.outcome"] == "infra_fault"
    assert attributes(span.events[0])["exception.message"] == f"too late, {SECRET}"


HOSTILE: list[Any] = [
    {"role": "user", "content": [{"type": "text"}, {"type": "image_url"}, {"type": ["x"]}, 3, {"type": "input_audio"}]},
    {"role": 7, "content": {"a": "b"}},
    {"role": "assistant", "content": None, "tool_calls": "no list"},
    {"role": "tool", "content": ["\ud800"], "tool_call_id": ["x"]},
    {"role": "user", "content": "\ud800<script>alert(1)</script>\0"},
]
EXCHANGES: list[Any] = [
    3,
    {"started_at": "x", "ended_at": None},
    {"started_at": math.nan, "ended_at": math.inf},
    {"started_at": -5.0, "ended_at": 1e300, "prompt_tokens": -1, "completion_tokens": 2**70, "policy_version": True},
    {"started_at": T0 + 9, "ended_at": T0 + 3, "prompt_tokens": "many", "policy_version": "new"},
]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_hostile_logs_give_valid_spans(exchange: Any) -> None:
    calls = [
        call("\ud800" * 500, "{not json", "c"),
        call(arguments='{"a": ' * 30),
        {"id": None, "type": "custom", "custom": 4},
    ]
    choice = answer("<script>", exchange_id="e" * 9000, exchange=exchange, message={"tool_calls": calls})
    tools: list[Any] = [{"type": "function", "function": {"name": "\ud800", "description": 5}}, {"type": "x"}]
    trajectory = Trajectory(
        messages_and_choices=[*HOSTILE, choice, {"role": "tool", "tool_call_id": "c", "content": None}],
        metrics={f"m{i}\ud800": float(i) for i in range(300)} | {"duration": 1e300, "ruler_score": math.nan, "independent_reward": 0},
        tools=tools,
        logs=["RULER explanation: \ud800"],
        metadata={"scenario_id": "\ud800" * 500, "big": 2**80, "outcome": "policy_fault"},
    )  # fmt: skip
    trace = rollout_spans(trajectory, PLACE, TEXTS)
    check(trace)
    assert all(0 <= span.start_time <= span.end_time < 1e19 for span in trace)
    assert all(len(span.name) < 250 and len(attributes(span)) < 250 for span in trace)
