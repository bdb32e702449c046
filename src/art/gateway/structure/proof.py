"""Prove that grammars fit a model: answers as its chat template writes them match, token by token, and come back."""

from __future__ import annotations

import json
from typing import Any

from art.errors import ArtError
from art.gateway.format.fidelity import TOOL
from art.gateway.format.renderer import Renderer, parse
from art.gateway.structure.grammar import AnswerShape, write_grammar
from art.gateway.structure.style import AnswerStyle, answer_tokens
from art.kernels.grammar import Vocabulary
from art.protocol.chat import Message, Tool, tool_call
from art.protocol.dialects.structured import CallRule, ContentForm

_ARGUMENTS = {"key": 'a "b"\n\u00e9 <c>', "more": {"numbers": [1, 2.5, None, True]}}
_CONTENT = '{"key": "a \\"b\\" <c>"}'
_SCHEMA: dict[str, Any] = {"type": "object"}


def find_problems(renderer: Renderer, style: AnswerStyle, vocabulary: Vocabulary) -> tuple[str | None, str | None]:
    """Why grammars cannot be used for content, and for answers that may have calls; `None` where they can."""
    content = _content_problem(renderer, style, vocabulary)
    return content, content or _calls_problem(renderer, style, vocabulary)


def _content_problem(renderer: Renderer, style: AnswerStyle, vocabulary: Vocabulary) -> str | None:
    ids = answer_tokens(renderer, {"role": "assistant", "content": _CONTENT}, None)
    shape = AnswerShape(opening="closed", form=ContentForm("json", _SCHEMA, "response_format"))
    if ids is None:  # the template's answers cannot be told from its prompts: then content is plain text
        ids = [*renderer.tokenizer.encode(_CONTENT, add_special_tokens=False), style.content.ends[0]]
    if _matches(style, shape, ids, vocabulary):
        return None
    return "an answer that its chat template writes does not match the grammar of JSON content"


def _calls_problem(renderer: Renderer, style: AnswerStyle, vocabulary: Vocabulary) -> str | None:
    if style.calls is None:
        return "no grammar is known for the format in which its chat template writes tool calls"
    for count in (1,) if style.calls.between is None else (1, 2):
        calls = [tool_call(f"call_{i}", "look_up", json.dumps(_ARGUMENTS, ensure_ascii=False)) for i in range(count)]
        tools: list[Tool] = [TOOL]
        answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        ids = answer_tokens(renderer, answer, tools)
        shape = AnswerShape(opening="closed", rule=CallRule("required"), arguments={"look_up": _SCHEMA})
        if ids is None or not _matches(style, shape, ids, vocabulary):
            return "tool calls that its chat template writes do not match their grammar"
        read = parse(renderer, [], ids, tools).tool_calls  # without a prompt, which may have opened reasoning
        if [(call.name, json.loads(call.arguments)) for call in read] != [("look_up", _ARGUMENTS)] * count:
            return "tool calls that its chat template writes are not read back"
    return None


def _matches(style: AnswerStyle, shape: AnswerShape, token_ids: list[int], vocabulary: Vocabulary) -> bool:
    grammar = write_grammar(style, shape)
    try:
        matcher = vocabulary.matcher(grammar.text, grammar.stop_token_ids)
        return all(map(matcher.advance, token_ids))
    except ArtError:
        return False
