"""Check that a model's text format round-trips: messages -> tokens -> messages, over several turns.

Small conversations are rendered, with the answer tokenised as the chat template writes it. Then
    extended    the prompt of the next turn must begin with the exact tokens of this turn, or be a declared branch, and
                go on with what the template writes
    parsed      the answer's tokens must give back the text, the reasoning and the tool calls of the message
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from art.errors import ArtError
from art.gateway.renderer import THINK, RecordedTurn, Renderer, parse, template_messages, without
from art.protocol.answers import Branch
from art.protocol.chat import Message, Tool, tool_call

_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
_FUNCTION = {"name": "look_up", "description": "Find a value by its key.", "parameters": _PARAMETERS}
TOOL: Tool = {"type": "function", "function": _FUNCTION}


@dataclass(frozen=True, slots=True)
class ProbeConversation:
    """A test conversation: messages, the answer to them, and the messages of the next turn."""

    name: str
    asked: list[Message]
    answer: Message
    then: list[Message]
    tools: list[Tool] | None = None


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of checking a model's text format on one test conversation."""

    name: str
    branch: str | None = None
    """Reason why the next prompt must be rendered again instead of extending the tokens of this turn."""
    extend_problem: str | None = None
    parse_problem: str | None = None
    refused: str | None = None
    """Error of a chat template that does not accept the conversation."""
    detached: bool = False
    """The rendered conversation does not begin with the prompt, so the answer's tokens cannot be told apart."""


def plain_conversations() -> list[ProbeConversation]:
    """Make test conversations of two turns, with and without a system message."""
    user: Message = {"role": "user", "content": "What is 1+1? \u00e9"}
    answer: Message = {"role": "assistant", "content": "It is 2,\n\nas \u00fcsual. \U0001f642"}
    then: list[Message] = [{"role": "user", "content": "And 2+2?"}]
    asked: dict[str, list[Message]] = {"two turns": [user]}
    asked["a system message"] = [{"role": "system", "content": "Be brief."}, user]
    return [ProbeConversation(name, messages, answer, then) for name, messages in asked.items()]


def reasoning_conversation() -> ProbeConversation:
    """Make a test conversation whose answer has reasoning."""
    asked, then = ([{"role": "user", "content": text}] for text in ("What is 2+2?", "And 3+3?"))
    answer: Message = {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two."}
    return ProbeConversation("reasoning", asked, answer, then)


def tool_conversations() -> list[ProbeConversation]:
    """Make a test conversation with a tool call, and one with text before a call whose arguments need escaping."""
    user: Message = {"role": "user", "content": "Look it up."}
    result: Message = {"role": "tool", "tool_call_id": "call_a", "name": "look_up", "content": "found"}

    def answer(content: str, arguments: dict[str, Any]) -> Message:
        call = tool_call("call_a", "look_up", json.dumps(arguments, ensure_ascii=False))
        return {"role": "assistant", "content": content, "tool_calls": [call]}

    hard = {"key": 'a "b"\n\u00e9 <c>', "more": {"numbers": [1, 2.5, None, True]}}
    return [
        ProbeConversation("a tool call", [user], answer("", {"key": "a"}), [result], [TOOL]),
        ProbeConversation("text and a tool call", [user], answer("I look.", hard), [result], [TOOL]),
    ]


def examine(renderer: Renderer, conversation: ProbeConversation) -> Examined:
    """Check a model's text format on a conversation: render it, parse its answer, extend it by the next turn."""
    name, tools = conversation.name, conversation.tools
    whole = [*conversation.asked, conversation.answer]
    try:
        prompt = renderer.render(conversation.asked, tools)
        expected = renderer.render([*whole, *conversation.then], tools)
        completion = renderer.completion(whole, tools)
    except ArtError as error:
        return Examined(name, refused=error.message)
    if completion is None:
        return Examined(name, detached=True)
    parse_problem = _parse_problem(renderer, conversation, prompt, completion)
    turn = RecordedTurn(whole, prompt, completion)
    extended = renderer.bridge(turn, conversation.then, tools)
    if isinstance(extended, Branch):
        return Examined(name, branch=extended.reason, parse_problem=parse_problem)
    # Whether templates print reasoning depends on the messages that follow.
    ours, theirs = (without(THINK, renderer.tokenizer.text(ids)) for ids in (extended, expected))
    extend_problem = None
    if extended[: len(prompt + completion)] != prompt + completion:
        extend_problem = "the next turn does not begin with the recorded tokens, and is not a declared branch"
    elif ours != theirs:
        extend_problem = f"the next turn ends with {ours[-80:]!r}, but the template writes {theirs[-80:]!r}"
    return Examined(name, extend_problem=extend_problem, parse_problem=parse_problem)


def _parse_problem(
    renderer: Renderer, conversation: ProbeConversation, prompt: list[int], answer: list[int]
) -> str | None:
    message = template_messages([conversation.answer])[0]
    reasoning = message.get("reasoning_content") or ""
    if reasoning not in renderer.tokenizer.text(answer):
        reasoning = ""  # the template does not write reasoning
    parsed = parse(renderer, prompt, answer, conversation.tools)
    text = message["content"].strip()
    if message.get("tool_calls") and (text not in renderer.tokenizer.text(answer) or text == parsed.reasoning):
        text = ""  # beside a call the template writes no text, or writes it as reasoning
        reasoning = reasoning or parsed.reasoning or ""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    called = [(one["name"], one["arguments"]) for one in functions]
    pairs: list[tuple[str, Any, Any]] = [
        ("text", text, parsed.content.strip()),
        ("reasoning", reasoning, (parsed.reasoning or "").strip()),
        ("tool calls", called, [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]),
    ]
    for what, before, after in pairs:
        if before != after:
            return f"the answer's {what} {before!r} came back from the parser as {after!r}"
    return None
