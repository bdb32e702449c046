"""Prove a renderer: on probe conversations its tokens must equal those of the model's chat template."""

from __future__ import annotations

from art.errors import ArtError, InvalidRequestError
from art.gateway.format.fidelity import TOOL
from art.gateway.format.renderer import RecordedTurn, Renderer, template_messages
from art.protocol.chat import Message, Tool, tool_call

_FUNCTION = {**TOOL["function"], "description": 'Find "a" value, \u00e9 and <tags>.'}
_TOOLS: list[Tool] = [{"type": "function", "function": _FUNCTION}]


def _call(key: str) -> Message:
    return tool_call(f"call_{key}", "look_up", f'{{"key": "{key}"}}')


def _probes() -> list[tuple[str, list[Message], list[Tool] | None]]:
    system = {"role": "system", "content": "Be brief.\n\nAnswer in  English."}
    user = {"role": "user", "content": " What is 1+1? \u00e9\U0001f642\n"}
    answer = {"role": "assistant", "content": "2, of course\n"}
    bye = {"role": "user", "content": "And 2+2?"}
    call = {"role": "assistant", "content": "", "tool_calls": [_call("a")]}
    calls = {"role": "assistant", "content": "I look twice.", "tool_calls": [_call("b"), _call("c")]}
    results = [
        {"role": "tool", "tool_call_id": "call_b", "name": "look_up", "content": "1\n"},
        {"role": "tool", "tool_call_id": "call_c", "name": "look_up", "content": '{"x": [1, 2]}'},
    ]
    result = {"role": "tool", "tool_call_id": "call_a", "name": "look_up", "content": "found"}
    thought = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    thought_call = {**call, "reasoning_content": "I must look."}
    return [
        ("a user message", [user], None),
        ("a system message", [system, user], None),
        ("two turns", [system, user, answer, bye], None),
        ("tools", [system, user], _TOOLS),
        ("tools without system message", [user], _TOOLS),
        ("a tool call", [system, user, call, result], _TOOLS),
        ("two tool calls", [user, calls, *results, answer, bye], _TOOLS),
        ("reasoning", [user, thought, bye, thought, bye], None),
        ("reasoning and a tool call", [system, user, thought_call, result], _TOOLS),
    ]


_REQUIRED_PROBES = 3
"""Number of first probes that a template must accept. A later one that it refuses (parallel calls, say) is skipped."""


def find_mismatch(renderer: Renderer) -> str | None:
    """Name the first test conversation that a renderer and the chat template render differently; `None` if none is."""
    tokenizer, kwargs = renderer.tokenizer, renderer.template_kwargs
    for number, (name, messages, tools) in enumerate(_probes()):
        try:
            expected = tokenizer.apply_chat_template(
                template_messages(messages), tools=tools, add_generation_prompt=True, **kwargs
            )
        except InvalidRequestError:
            if number < _REQUIRED_PROBES:
                return name
            continue
        try:
            if renderer.render(messages, tools) != expected:
                return name
        except ArtError:
            return name
    return _bridge_mismatch(renderer)


def _bridge_mismatch(renderer: Renderer) -> str | None:
    system, user, answer, bye = _probes()[2][1]
    prompt = renderer.render([system, user], None)
    answer = {**answer, "content": "two"}
    completion = [*renderer.tokenizer.encode("two", add_special_tokens=False), renderer.stop_token_ids[0]]
    bridged = renderer.bridge(RecordedTurn([system, user, answer], prompt, completion), [bye], None)
    expected = renderer.tokenizer.apply_chat_template(
        [system, user, answer, bye], add_generation_prompt=True, **renderer.template_kwargs
    )
    return None if bridged == expected else "a bridge to the next turn"
