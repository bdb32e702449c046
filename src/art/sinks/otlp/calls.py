"""The attributes of one chat request and of one tool call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from art.messages import is_choice
from art.sinks.otlp import content
from art.sinks.otlp.trace import MAX_NAME, SpanSettings, Value
from art.sinks.sink import Run
from art.trajectory import History


def exchange_id(choice: Any) -> str:
    """Return the id of the exchange that our server recorded; empty for an answer of another endpoint."""
    recorded = getattr(choice, "exchange_id", None)
    return recorded[:MAX_NAME] if isinstance(recorded, str) else ""


def policy_version(choice: Any) -> int | None:
    """Return the step whose weights sampled a choice; `None` if the choice does not say."""
    return _count(_exchange(choice).get("policy_version"))


def chat_attributes(run: Run, choice: Any) -> dict[str, Value]:
    """Attributes of the request that a choice answers, without texts.

    An answer without an exchange came from another endpoint of OpenAI's API. Its provider is `openai`, which the
    conventions allow for the flavour of the API, even if another company serves it.
    """
    recorded, version = exchange_id(choice), policy_version(choice)
    model = chat_model(run, choice)
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


def chat_content(conversation: content.Conversation, place: int) -> dict[str, Value]:
    """Attributes with the texts of the request whose answer is at `place`."""
    attributes: dict[str, Value] = {
        "gen_ai.input.messages": conversation.before(place),
        "gen_ai.output.messages": conversation.answer(place),
    }
    if conversation.tools is not None:
        attributes["gen_ai.tool.definitions"] = conversation.tools
    return attributes


def chat_model(run: Run, choice: Any) -> str:
    """Return the name of the model that was asked."""
    return f"{run.project}/{run.name}" if exchange_id(choice) else run.name


def tool_attributes(history: History, place: int, settings: SpanSettings) -> list[dict[str, Value]]:
    """Attributes of each call of the answer at `place` that a tool answered before the next request.

    A call without an answer may never have run, so it is left out.
    """
    results = _tool_results(history.messages_and_choices[place + 1 :])
    calls = []
    for call_id, name, arguments in content.tool_calls(history.messages_and_choices[place]):
        if call_id is None or call_id not in results:
            continue
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name[:MAX_NAME],
            "gen_ai.tool.call.id": call_id[:MAX_NAME],
            "gen_ai.tool.type": "function",
        }
        if settings.content:
            limit = settings.max_characters
            attributes["gen_ai.tool.call.arguments"] = content.short_text(content.to_json(arguments), limit)
            attributes["gen_ai.tool.call.result"] = content.short_text(content.tool_result(results[call_id]), limit)
            if (description := content.tool_description(history.tools, name)) is not None:
                attributes["gen_ai.tool.description"] = content.short_text(description, limit)
        calls.append(attributes)
    return calls


def _tool_results(items: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """The answers of tools up to the next request, by the id of the call."""
    results: dict[str, Mapping[str, Any]] = {}
    for item in items:
        if is_choice(item):
            break
        if isinstance(item, Mapping) and item.get("role") == "tool":
            results.setdefault(str(item.get("tool_call_id")), item)
    return results


def _exchange(choice: Any) -> Mapping[str, Any]:
    exchange = getattr(choice, "exchange", None)
    return exchange if isinstance(exchange, Mapping) else {}


def _count(value: Any) -> int | None:
    """A number that fits protobuf's 64 bits; `None` for anything else, since logs can be edited."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None
