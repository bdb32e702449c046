"""A rollout as spans of OpenTelemetry's GenAI conventions.

    invoke_agent NAME             the rollout; events `gen_ai.evaluation.result` for the reward and each judge's score
      chat PROJECT/NAME           each answer of the model
      execute_tool TOOL           each tool call that got an answer

Every id is a hash of the rollout's place in the log and of its content, so a repeated delivery has the same ids. Texts
(messages, tools, judges' explanations, metadata) are left out unless `SpanSettings.content` asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from art.messages import is_choice
from art.sinks.otlp import content
from art.sinks.otlp.calls import chat_attributes, chat_content, chat_model, exchange_id, policy_version, tool_attributes
from art.sinks.otlp.scores import Evaluation, evaluations
from art.sinks.otlp.times import Period, choice_periods, rollout_period, tool_period
from art.sinks.otlp.trace import (
    MAX_NAME,
    MAX_NAMED,
    Place,
    RolloutTrace,
    Span,
    SpanEvent,
    SpanSettings,
    Value,
    agent_span,
    hash_of,
)
from art.trajectory import History, PydanticException, Trajectory, finite_number, is_policy_fault


def rollout_trace(trajectory: Trajectory, place: Place, settings: SpanSettings) -> RolloutTrace:
    """Make the trace of a rollout that has a trajectory."""
    return _Maker(trajectory, place, settings).trace()


def failed_trace(failure: PydanticException, place: Place, at: float, settings: SpanSettings) -> RolloutTrace:
    """Make the trace of a rollout that raised. Logs do not say when: it gets the time `at`, marked as estimated."""
    kind = failure.type[:MAX_NAME]
    trace_id = hash_of(place.run.id, place.path, failure.type, failure.message, failure.traceback)[:16]
    name, attributes = agent_span(place)
    attributes |= {"art.outcome": "infra_fault", "error.type": kind, "art.time.estimated": True}
    details: dict[str, Value] = {"exception.type": kind}
    if settings.content:
        details["exception.message"] = content.short_text(failure.message, settings.max_characters)
        details["exception.stacktrace"] = content.short_text(failure.traceback, settings.max_characters)
    root = Span(
        trace_id=trace_id, span_id=hash_of(trace_id.hex(), "rollout")[:8], name=name, attributes=attributes,
        period=Period(at, at, is_estimated=True), events=[SpanEvent("exception", at, details)], error=kind,
    )  # fmt: skip
    return RolloutTrace([root], [])


class _Maker:
    """Makes the spans of one rollout."""

    def __init__(self, trajectory: Trajectory, place: Place, settings: SpanSettings) -> None:
        self._trajectory, self._place, self._settings = trajectory, place, settings
        self._histories: Sequence[History] = [trajectory, *trajectory.additional_histories]
        choices = [item for history in self._histories for item in history.messages_and_choices if is_choice(item)]
        self._period = rollout_period(trajectory, choices)
        began = trajectory.start_time.isoformat()
        self._trace_id = hash_of(place.run.id, place.path, began, *map(exchange_id, choices))[:16]
        rollout_id = trajectory.metadata.get("rollout_id")
        self._conversation = str(rollout_id)[:MAX_NAME] if rollout_id else place.path
        self._version = trajectory.initial_policy_version
        if self._version is None:
            self._version = next((v for choice in choices if (v := policy_version(choice)) is not None), None)
        self._sent: set[str] = set()
        limit = settings.max_characters
        self._texts = [content.Conversation(history, limit) for history in self._histories] if settings.content else []

    def trace(self) -> RolloutTrace:
        results = evaluations(self._trajectory, with_explanations=self._settings.content)
        children = [
            span for number, history in enumerate(self._histories) for span in self._history_spans(number, history)
        ]
        return RolloutTrace([self._root(results), *sorted(children, key=lambda span: span.period.start)], results)

    def _root(self, results: list[Evaluation]) -> Span:
        name, attributes = agent_span(self._place)
        attributes["gen_ai.conversation.id"] = self._conversation
        if self._version is not None:
            attributes["gen_ai.agent.version"] = str(self._version)
        attributes["art.outcome"] = "policy_fault" if is_policy_fault(self._trajectory) else "ok"
        if (reward := finite_number(self._trajectory.reward)) is not None:
            attributes["art.reward"] = reward
        if (scenario := self._trajectory.metadata.get("scenario_id")) is not None:
            attributes["art.scenario_id"] = str(scenario)[:MAX_NAME]
        for metric, value in list(self._trajectory.metrics.items())[:MAX_NAMED]:
            if (number := finite_number(value)) is not None:
                attributes[f"art.metrics.{metric[:MAX_NAME]}"] = number
        if self._settings.content:
            attributes |= self._root_content()
        events = [self._result(one, self._period.end) for one in results]
        return self._span(("rollout",), name, self._period, attributes, events)

    def _root_content(self) -> dict[str, Value]:
        """The messages before the first answer, the last answer, and the metadata."""
        limit, items = self._settings.max_characters, self._trajectory.messages_and_choices
        places = [i for i, item in enumerate(items) if is_choice(item)]
        opening = places[0] if places else len(items)
        attributes: dict[str, Value] = {"gen_ai.input.messages": self._texts[0].before(opening)}
        if places:
            attributes["gen_ai.output.messages"] = self._texts[0].answer(places[-1])
        for key, value in list(self._trajectory.metadata.items())[:MAX_NAMED]:
            if value is not None:
                short = content.short_text(value, limit) if isinstance(value, str) else value
                attributes[f"art.metadata.{key[:MAX_NAME]}"] = short
        return attributes

    def _history_spans(self, number: int, history: History) -> list[Span]:
        """The spans of one conversation. An answer that another conversation of the rollout shares is sent once."""
        items = history.messages_and_choices
        places = [i for i, item in enumerate(items) if is_choice(item)]
        periods = choice_periods([items[i] for i in places], self._period)
        spans = []
        for turn, (place, period) in enumerate(zip(places, periods, strict=True)):
            recorded = exchange_id(items[place])
            if recorded and recorded in self._sent:
                continue
            self._sent.add(recorded)
            attributes = chat_attributes(self._place.run, items[place]) | {"art.history": number}
            if self._texts:
                attributes |= chat_content(self._texts[number], place)
            events = self._turn_reward(turn, period.end, recorded) if number == 0 else []
            name = f"chat {chat_model(self._place.run, items[place])}"
            spans.append(self._span(("chat", number, place, recorded), name, period, attributes, events))
            following = periods[turn + 1] if turn + 1 < len(periods) else None
            calls = tool_attributes(history, place, self._settings)
            between = tool_period(period, following, self._period)
            for k, call in enumerate(calls):
                name = f"execute_tool {call['gen_ai.tool.name']}"
                spans.append(self._span(("tool", number, place, k), name, between, call, []))
        return spans

    def _span(
        self, path: tuple[object, ...], name: str, period: Period, attributes: dict[str, Value], events: list[SpanEvent]
    ) -> Span:
        attributes = attributes | {"gen_ai.conversation.id": self._conversation}
        if period.is_estimated:
            attributes["art.time.estimated"] = True
        root_id = hash_of(self._trace_id.hex(), "rollout")[:8]
        return Span(
            trace_id=self._trace_id, span_id=hash_of(self._trace_id.hex(), *path)[:8],
            parent_id=None if path == ("rollout",) else root_id, name=name,
            kind="client" if path[0] == "chat" else "internal", period=period, attributes=attributes, events=events,
        )  # fmt: skip

    def _turn_reward(self, turn: int, at: float, response_id: str) -> list[SpanEvent]:
        rewards = self._trajectory.turn_rewards
        reward = finite_number(rewards[turn]) if turn < len(rewards) else None
        return [] if reward is None else [self._result(Evaluation("turn_reward", reward), at, response_id)]

    def _result(self, one: Evaluation, at: float, response_id: str = "") -> SpanEvent:
        attributes: dict[str, Value] = {
            "gen_ai.evaluation.name": one.name[:MAX_NAME],
            "gen_ai.evaluation.score.value": one.value,
        }
        if one.explanation is not None:
            attributes["gen_ai.evaluation.explanation"] = one.explanation
        if response_id:
            attributes["gen_ai.response.id"] = response_id
        return SpanEvent("gen_ai.evaluation.result", at, attributes)
