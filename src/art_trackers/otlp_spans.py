"""A rollout as spans of OpenTelemetry's GenAI conventions.

    invoke_agent NAME             the rollout; events `gen_ai.evaluation.result` for the reward and each judge's score
      chat PROJECT/NAME           each answer of the model

Every id is a hash of the rollout's place in the log and of its content, so a repeated delivery has the same ids. Texts
(messages, tools, judges' explanations, metadata) are left out unless `SpanSettings.content` asks for them.

A choice that our server sampled names the start and end of its request. Nothing else in a log has times of its own:
choices of another endpoint get those of their rollout, marked as estimated. Tool calls have no spans, since nobody
knows when they ran; their arguments and results are in the messages.

The forms of messages and tools are those of the conventions' JSON schemas for `gen_ai.input.messages`,
`gen_ai.output.messages` and `gen_ai.tool.definitions`. Each attribute holds JSON text that stays valid below its limit:
long texts are shortened, then the oldest messages are left out, and a part of type `art.left_out` says how much is
missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from art.messages import is_choice, to_message
from art.sinks import Run
from art.trajectory import History, PydanticException, Trajectory, finite_number, is_policy_fault

Value = str | bool | int | float | list[str]
MAX_NAMED = 100
"""Number of a rollout's metrics, and of entries of its metadata, that become attributes."""
MAX_NAME = 200
"""Characters of names and ids."""
_MAX_EXPLANATION = 20_000
_LATEST = 9e9
"""Seconds since the epoch (in 2255) above which a time in a log counts as unknown."""


@dataclass(frozen=True, slots=True)
class RolloutPlace:
    """The position of a rollout in the log of a run."""

    run: Run
    split: str
    step: int
    group: int
    """Position among all groups of the split and step, from 0."""
    index: int
    """Position in the group, from 0. Failed rollouts come after those that have a trajectory."""

    @property
    def path(self) -> str:
        return f"{self.run.project}/{self.run.name}/{self.split}/{self.step}/{self.group}/{self.index}"


@dataclass(frozen=True, slots=True)
class SpanSettings:
    content: bool = False
    """Whether texts are sent: messages, tools, judges' explanations, metadata, errors' messages."""
    max_characters: int = 100_000
    """Longest text of one attribute, about. Longer conversations keep their newest messages."""
    resource: Resource = field(default_factory=Resource.get_empty)


@dataclass(frozen=True, slots=True)
class Period:
    """A start and an end, in seconds since the epoch."""

    start: float
    end: float
    is_estimated: bool = False


def rollout_spans(trajectory: Trajectory, place: RolloutPlace, settings: SpanSettings) -> list[ReadableSpan]:
    """Make the spans of a rollout that has a trajectory; the first one is the rollout itself."""
    return _Rollout(trajectory, place, settings).spans()


def failed_span(failure: PydanticException, place: RolloutPlace, at: float, settings: SpanSettings) -> ReadableSpan:
    """Make the span of a rollout that raised. Logs do not say when: it gets the time `at`, marked as estimated."""
    kind = failure.type[:MAX_NAME]
    trace_id = _hash(place.run.id, place.path, failure.type, failure.message, failure.traceback)[:16]
    attributes = _agent_attributes(place) | {"art.outcome": "infra_fault", "error.type": kind}
    details: dict[str, Value] = {"exception.type": kind}
    if settings.content:
        details["exception.message"] = short_text(failure.message, settings.max_characters)
        details["exception.stacktrace"] = short_text(failure.traceback, settings.max_characters)
    period, status = Period(at, at, is_estimated=True), Status(StatusCode.ERROR, clean(kind))
    name, events = f"invoke_agent {place.run.name}", [_event("exception", at, details)]
    return _Trace(trace_id, settings).span((), name, period, attributes, events, status)


def exchange_id(choice: Any) -> str:
    """Return the id of the exchange that our server recorded; empty for an answer of another endpoint."""
    recorded = getattr(choice, "exchange_id", None)
    return recorded[:MAX_NAME] if isinstance(recorded, str) else ""


@dataclass(frozen=True, slots=True)
class _Trace:
    """Makes the spans of one trace."""

    trace_id: bytes  # [16]
    settings: SpanSettings

    def span(
        self, path: tuple[object, ...], name: str, period: Period, attributes: Mapping[str, Value],
        events: Sequence[Event] = (), status: Status | None = None,
    ) -> ReadableSpan:  # fmt: skip
        """Make the span at a place in the trace; the one at the empty `path` is the parent of the others."""
        estimated: dict[str, Value] = {"art.time.estimated": True} if period.is_estimated else {}
        return ReadableSpan(
            clean(name),
            self._context(path),
            parent=self._context(()) if path else None,
            resource=self.settings.resource,
            attributes=_clean({**attributes, **estimated}),
            events=events,
            kind=SpanKind.CLIENT if path[:1] == ("chat",) else SpanKind.INTERNAL,
            status=status or Status(StatusCode.UNSET),
            start_time=_nanoseconds(period.start),
            end_time=_nanoseconds(period.end),
            instrumentation_scope=InstrumentationScope("art", sys.modules["art"].__version__),
        )

    def _context(self, path: tuple[object, ...]) -> SpanContext:
        span_id = int.from_bytes(_hash(self.trace_id.hex(), *(path or ("rollout",)))[:8])
        return SpanContext(int.from_bytes(self.trace_id), span_id, is_remote=False, trace_flags=TraceFlags(1))


class _Rollout:
    """One rollout that has a trajectory."""

    def __init__(self, trajectory: Trajectory, place: RolloutPlace, settings: SpanSettings) -> None:
        self._trajectory, self._place, self._settings = trajectory, place, settings
        self._histories: Sequence[History] = [trajectory, *trajectory.additional_histories]
        self._choices = [one for history in self._histories for one in history.messages_and_choices if is_choice(one)]
        self._period = _rollout_period(trajectory, self._choices)
        began = trajectory.start_time.isoformat()
        self._trace = _Trace(_hash(place.run.id, place.path, began, *map(exchange_id, self._choices))[:16], settings)
        conversation_id = str(trajectory.metadata.get("rollout_id") or place.path)
        self._conversation: dict[str, Value] = {"gen_ai.conversation.id": conversation_id[:MAX_NAME]}
        limit = settings.max_characters
        self._texts = [ConversationTexts(history, limit) for history in self._histories] if settings.content else []

    def spans(self) -> list[ReadableSpan]:
        sent: set[str] = set()
        children = [span for number in range(len(self._histories)) for span in self._history_spans(number, sent)]
        return [self._root(), *sorted(children, key=lambda span: span.start_time or 0)]

    def _root(self) -> ReadableSpan:
        trajectory = self._trajectory
        attributes = _agent_attributes(self._place) | self._conversation
        versions = [trajectory.initial_policy_version, *map(_policy_version, self._choices)]
        if (version := next((version for version in versions if version is not None), None)) is not None:
            attributes["gen_ai.agent.version"] = str(version)
        attributes["art.outcome"] = "policy_fault" if is_policy_fault(trajectory) else "ok"
        if (reward := finite_number(trajectory.reward)) is not None:
            attributes["art.reward"] = reward
        if (scenario := trajectory.metadata.get("scenario_id")) is not None:
            attributes["art.scenario_id"] = str(scenario)[:MAX_NAME]
        for metric, value in list(trajectory.metrics.items())[:MAX_NAMED]:
            if (number := finite_number(value)) is not None:
                attributes[f"art.metrics.{metric[:MAX_NAME]}"] = number
        if self._settings.content:
            attributes |= self._root_content()
        scores = _scores(trajectory, with_reasons=self._settings.content)
        events = [_evaluation(self._period.end, *score) for score in scores]
        return self._trace.span((), f"invoke_agent {self._place.run.name}", self._period, attributes, events)

    def _root_content(self) -> dict[str, Value]:
        """The messages before the first answer, the last answer, and the metadata."""
        items = self._trajectory.messages_and_choices
        places = [i for i, item in enumerate(items) if is_choice(item)]
        opening = places[0] if places else len(items)
        attributes: dict[str, Value] = {"gen_ai.input.messages": self._texts[0].before(opening)}
        if places:
            attributes["gen_ai.output.messages"] = self._texts[0].answer(places[-1])
        for key, value in list(self._trajectory.metadata.items())[:MAX_NAMED]:
            if value is not None:
                short = short_text(value, self._settings.max_characters) if isinstance(value, str) else value
                attributes[f"art.metadata.{key[:MAX_NAME]}"] = short
        return attributes

    def _history_spans(self, number: int, sent: set[str]) -> list[ReadableSpan]:
        """The spans of one conversation. An answer that another conversation of the rollout shares is sent once."""
        history, rewards = self._histories[number], self._trajectory.turn_rewards if number == 0 else []
        items = history.messages_and_choices
        places = [i for i, item in enumerate(items) if is_choice(item)]
        spans = []
        for turn, place in enumerate(places):
            recorded = exchange_id(items[place])
            if recorded and recorded in sent:
                continue
            sent.add(recorded)
            unknown = Period(self._period.start, self._period.end, is_estimated=True)
            period = _recorded_period(items[place]) or unknown
            attributes = self._conversation | _chat_attributes(self._place.run, items[place]) | {"art.history": number}
            if self._texts:
                attributes |= self._texts[number].request(place)
            name = f"chat {attributes['gen_ai.request.model']}"
            reward = finite_number(rewards[turn]) if turn < len(rewards) else None
            events = [] if reward is None else [_evaluation(period.end, "turn_reward", reward, None, recorded)]
            spans.append(self._trace.span(("chat", number, place, recorded), name, period, attributes, events))
        return spans


def _agent_attributes(place: RolloutPlace) -> dict[str, Value]:
    """The attributes that the first span of every rollout has."""
    run = place.run
    return {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.provider.name": "art", "gen_ai.agent.name": run.name,
        "gen_ai.request.model": f"{run.project}/{run.name}", "gen_ai.conversation.id": place.path,
        "art.project": run.project, "art.model": run.name, "art.run": run.id, "art.split": place.split,
        "art.step": place.step, "art.group": place.group, "art.rollout": place.index,
    }  # fmt: skip


def _chat_attributes(run: Run, choice: Any) -> dict[str, Value]:
    """Attributes of the request that a choice answers, without texts.

    An answer without an exchange came from another endpoint of OpenAI's API. Its provider is `openai`, which the
    conventions allow for the flavour of the API, even if another company serves it.
    """
    recorded, version = exchange_id(choice), _policy_version(choice)
    model = f"{run.project}/{run.name}" if recorded else run.name
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "art" if recorded else "openai",
        "gen_ai.request.model": model,
    }
    if recorded:
        attributes |= {"gen_ai.response.id": recorded, "art.exchange_id": recorded}
    if version is not None:
        attributes |= {"gen_ai.response.model": f"{model}@{version}", "art.policy_version": version}
    if reason := getattr(choice, "finish_reason", None):
        attributes["gen_ai.response.finish_reasons"] = [str(reason)[:MAX_NAME]]
    for name, key in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        if (count := _count(_exchange(choice).get(key))) is not None:
            attributes[f"gen_ai.usage.{name}_tokens"] = count
    return attributes


def _scores(trajectory: Trajectory, *, with_reasons: bool) -> list[tuple[str, float, str | None]]:
    """Name, value and explanation of the reward, each judge's score and each part of one, where they are finite.

    `art.rewards` leaves the metrics `independent_reward` and `<judge>_score`; the last judge's score is the reward. A
    metric of the user's own may end with `_score` too; then it has neither parts nor an explanation.
    """
    metrics = trajectory.metrics
    reward = finite_number(trajectory.reward)
    scores: list[tuple[str, float, str | None]] = [] if reward is None else [("reward", reward, None)]
    suffix = "_score"
    judges = [name.removesuffix(suffix) for name in metrics if name.endswith(suffix)]
    for judge in judges if "independent_reward" in metrics else ():
        opening = f"{judge.upper()} explanation: "
        reason = next((log.removeprefix(opening) for log in reversed(trajectory.logs) if log.startswith(opening)), None)
        parts = [name for name in metrics if name.startswith(f"{judge}/")]
        if metrics[judge + suffix] != trajectory.reward and reason is None and not parts:
            continue
        for name, value in [(judge, metrics[judge + suffix]), *((part, metrics[part]) for part in parts)]:
            if (number := finite_number(value)) is not None:
                scores.append((name, number, reason if with_reasons and name == judge else None))
    return scores


def _evaluation(at: float, name: str, value: float, reason: str | None, response_id: str = "") -> Event:
    attributes: dict[str, Value] = {"gen_ai.evaluation.name": name[:MAX_NAME], "gen_ai.evaluation.score.value": value}
    if reason is not None:
        attributes["gen_ai.evaluation.explanation"] = short_text(reason, _MAX_EXPLANATION)
    if response_id:
        attributes["gen_ai.response.id"] = response_id
    return _event("gen_ai.evaluation.result", at, attributes)


def _event(name: str, at: float, attributes: Mapping[str, Value]) -> Event:
    return Event(name, _clean(attributes), _nanoseconds(at))


# --- times ---


def _recorded_period(choice: Any) -> Period | None:
    """When the request of a choice ran, as our server noted it; `None` if the choice does not say."""
    start, end = _seconds(_exchange(choice).get("started_at")), _seconds(_exchange(choice).get("ended_at"))
    return None if start is None or end is None or end < start else Period(start, end)


def _rollout_period(trajectory: Trajectory, choices: Sequence[Any]) -> Period:
    """The period of a whole rollout.

    It begins at `start_time` and lasts for `metrics["duration"]`, and is longer if requests ran outside of that: the
    server's clock may differ, and a trajectory may be made at the end of a rollout. Without `duration` it ends with
    the last request, and the end is estimated.
    """
    known = [period for choice in choices if (period := _recorded_period(choice)) is not None]
    starts = [period.start for period in known]
    begun, duration = _seconds(trajectory.start_time.timestamp()), finite_number(trajectory.metrics.get("duration"))
    start = begun if begun is not None else min(starts, default=0.0)
    ended = None if begun is None or duration is None or duration < 0 else _seconds(start + duration)
    end = max([start if ended is None else ended, *(period.end for period in known)])
    return Period(min([start, *starts]), end, is_estimated=ended is None)


def _seconds(value: Any) -> float | None:
    number = finite_number(value)
    return number if number is not None and 0 <= number <= _LATEST else None


# --- values ---


def _exchange(choice: Any) -> Mapping[str, Any]:
    exchange = getattr(choice, "exchange", None)
    return exchange if isinstance(exchange, Mapping) else {}


def _policy_version(choice: Any) -> int | None:
    """The step whose weights sampled a choice; `None` if the choice does not say."""
    return _count(_exchange(choice).get("policy_version"))


def _count(value: Any) -> int | None:
    """A number that fits protobuf's 64 bits; `None` for anything else, since logs can be edited."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _clean(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Attributes that protobuf takes: valid UTF-8, integers of 64 bits, and anything else as text."""

    def clean_value(value: Any) -> Value:
        if isinstance(value, (bool, float)) or (isinstance(value, int) and -(2**63) <= value < 2**63):
            return value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return [clean(item) for item in value]
        return clean(str(value))

    return {clean(key): clean_value(value) for key, value in attributes.items()}


def _hash(*parts: object) -> bytes:
    """Return 32 bytes that are the same for the same parts, of which ids take their first bytes."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


_FINISH_REASONS = {"tool_calls": "tool_call"}
"""OpenAI's finish reasons that the conventions' messages spell in another way."""


def clean(text: str) -> str:
    """Replace what UTF-8 cannot say (half of a surrogate pair), which JSON may hold and protobuf refuses."""
    return text.encode("utf-8", "replace").decode()


def to_json(value: Any) -> str:
    return clean(json.dumps(value, ensure_ascii=False, default=str))


class ConversationTexts:
    """The texts of one conversation. Each message is converted once, although every later request repeats it."""

    def __init__(self, history: History, limit: int) -> None:
        """
        Args:
            limit: longest text of one attribute in characters, about.
        """
        self._items, self._limit = history.messages_and_choices, limit
        self._texts = [to_json(_shorten(_message(to_message(item)), limit // 4)) for item in self._items]
        definitions = [_definition(tool) for tool in history.tools or ()]
        self._tools = to_json(definitions) if definitions else None
        if self._tools is not None and len(self._tools) > limit:
            self._tools = to_json([{"type": one["type"], "name": one["name"]} for one in definitions])

    def request(self, place: int) -> dict[str, Any]:
        """Return the attributes of the request whose answer is at `place`."""
        tools = {} if self._tools is None else {"gen_ai.tool.definitions": self._tools}
        return {"gen_ai.input.messages": self.before(place), "gen_ai.output.messages": self.answer(place), **tools}

    def before(self, place: int) -> str:
        """Return the messages and answers before an item, as `gen_ai.input.messages`. The newest are kept."""
        first, size = place, 0
        while first > 0 and (first == place or size + len(self._texts[first - 1]) <= self._limit):
            first -= 1
            size += len(self._texts[first]) + 2
        missing = {"role": "system", "parts": [{"type": "art.left_out", "messages": first}]}
        return f"[{', '.join(([to_json(missing)] if first else []) + self._texts[first:place])}]"

    def answer(self, place: int) -> str:
        """Return the answer at a place, as `gen_ai.output.messages`."""
        choice = self._items[place]
        reason = str(getattr(choice, "finish_reason", None) or "")
        message = _shorten(_message(to_message(choice)), self._limit // 2)
        return to_json([{**message, "finish_reason": _FINISH_REASONS.get(reason, reason)}])


def tool_result(message: Mapping[str, Any]) -> str:
    """Return the answer of a tool as text."""
    content = message.get("content")
    return content if isinstance(content, str) else to_json(content)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = str(message.get("role", "")), message.get("content")
    parts: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        parts.append({"type": "reasoning", "content": str(reasoning)})
    if role == "tool":
        call_id = message.get("tool_call_id")
        parts.append({"type": "tool_call_response", "id": call_id, "response": tool_result(message)})
    elif isinstance(content, str):
        parts += [{"type": "text", "content": content}] if content else []
    elif content is not None:
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, Mapping) and part.get("type") != "text":  # what is no text keeps its fields
                parts.append({**part, "type": str(part.get("type", ""))})
            else:
                parts.append(
                    {"type": "text", "content": str(part.get("text", "") if isinstance(part, Mapping) else part)}
                )
    parts += _calls(message)
    if refusal := message.get("refusal"):
        parts.append({"type": "refusal", "content": str(refusal)})
    name = message.get("name")
    return {"role": role, "parts": parts, **({"name": str(name)} if name is not None else {})}


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of a message. Arguments are text if they are not JSON."""
    calls, parts = message.get("tool_calls"), []
    for call in calls if isinstance(calls, list) else []:
        if not isinstance(call, Mapping):
            continue
        function = call.get("function", call.get("custom"))
        function = function if isinstance(function, Mapping) else {}
        arguments = function.get("arguments", function.get("input"))
        with contextlib.suppress(ValueError):  # a model may write something else than JSON, which is shown as it is
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        call_id = None if call.get("id") is None else str(call["id"])
        name = str(function.get("name", ""))
        parts.append({"type": "tool_call", "id": call_id, "name": name, "arguments": arguments})
    return parts


def _definition(tool: Any) -> dict[str, Any]:
    tool = tool if isinstance(tool, Mapping) else {}
    function = tool.get("function")
    function = function if isinstance(function, Mapping) else tool
    known = {key: function[key] for key in ("description", "parameters") if function.get(key) is not None}
    return {"type": str(tool.get("type", "function")), "name": str(function.get("name", "")), **known}


def _shorten(message: dict[str, Any], limit: int) -> dict[str, Any]:
    """Shorten each part to about `limit` characters."""
    parts = []
    for part in message["parts"]:
        size = len(to_json(part))
        key = next((key for key in ("content", "response", "arguments") if key in part), None)
        if size <= limit:
            parts.append(part)
        elif key is None:
            parts.append({"type": "art.left_out", "part": part.get("type"), "characters": size})
        else:
            value = part[key] if isinstance(part[key], str) else to_json(part[key])
            parts.append({**part, key: short_text(value, limit)})
    return {**message, "parts": parts}


def short_text(text: str, limit: int) -> str:
    """Return the beginning of a text that is longer than `limit`, with a note of what is left out."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} characters left out)"
