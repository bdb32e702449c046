"""OpenTelemetry's GenAI conventions as a check, written from their text: what spans, events and messages must have.

https://github.com/open-telemetry/semantic-conventions-genai (model/gen-ai/spans.yaml, events.yaml, the JSON schemas of
messages). All of it has the status Development.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

INTERNAL, CLIENT = 1, 3
KINDS = {"invoke_agent": INTERNAL, "chat": CLIENT}
REQUIRED = {
    "invoke_agent": {"gen_ai.provider.name": str, "gen_ai.agent.name": str, "gen_ai.conversation.id": str},
    "chat": {"gen_ai.provider.name": str, "gen_ai.request.model": str, "gen_ai.conversation.id": str},
}
TYPES = {
    "gen_ai.usage.input_tokens": int, "gen_ai.usage.output_tokens": int, "gen_ai.response.finish_reasons": list,
    "gen_ai.response.id": str, "gen_ai.response.model": str,
    "gen_ai.agent.version": str, "error.type": str,
}  # fmt: skip
OPT_IN = {
    "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.definitions",
}  # fmt: skip
PARTS: dict[str, dict[str, Any]] = {
    "text": {"content": str},
    "reasoning": {"content": str},
    "tool_call": {"name": str},
    "tool_call_response": {"response": object},
    "blob": {"modality": str, "content": str},
    "uri": {"modality": str, "uri": str},
    "file": {"modality": str, "file_id": str},
}
"""Required fields of the parts that the schemas know. A part of any other type is a generic one."""


def check_span(name: str, kind: int, attributes: Mapping[str, Any]) -> None:
    """Assert that a span has what the conventions require of its operation."""
    operation = attributes["gen_ai.operation.name"]
    assert kind == KINDS[operation], f"{operation} has kind {kind}"
    for key, of in REQUIRED[operation].items():
        assert isinstance(attributes.get(key), of), f"{operation} has no {key}"
    target = {"invoke_agent": "agent.name", "chat": "request.model"}[operation]
    assert name == f"{operation} {attributes[f'gen_ai.{target}']}"
    for key, of in TYPES.items():
        assert key not in attributes or isinstance(attributes[key], of), f"{key} is {attributes[key]!r}"
    for key in OPT_IN & attributes.keys():
        check_content(key, attributes[key])


def check_event(name: str, attributes: Mapping[str, Any]) -> None:
    """Assert that an event of an evaluation has what the conventions require."""
    assert name == "gen_ai.evaluation.result"
    assert isinstance(attributes["gen_ai.evaluation.name"], str)
    assert isinstance(attributes["gen_ai.evaluation.score.value"], float)
    assert isinstance(attributes.get("gen_ai.evaluation.explanation", ""), str)


def check_content(key: str, text: str) -> None:
    """Assert that an attribute with content follows its JSON schema."""
    items = json.loads(text)
    assert isinstance(items, list)
    for item in items:
        if key == "gen_ai.tool.definitions":
            assert isinstance(item["type"], str)
            assert isinstance(item["name"], str)
            continue
        assert isinstance(item["role"], str)
        assert isinstance(item["parts"], list)
        assert isinstance(item.get("name", ""), str)
        for part in item["parts"]:
            for field, of in PARTS.get(part["type"], {}).items():
                assert isinstance(part[field], of), f"{part['type']} has {field} = {part.get(field)!r}"
