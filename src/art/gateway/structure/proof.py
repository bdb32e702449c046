"""Prove that grammars fit a model: answers as its chat template writes them match, token by token, and come back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from art.errors import ArtError
from art.gateway.format.renderer import Renderer, parse
from art.gateway.structure.grammar import AnswerShape, write_grammar
from art.gateway.structure.style import AnswerStyle, answer_tokens
from art.kernels.grammar import Vocabulary
from art.protocol.chat import Message, Tool, tool_call
from art.protocol.dialects.structured import CallRule, ContentForm

_ARGUMENTS: dict[str, Any] = {"key": 'a "b"\n\u00e9 <c>', "flag": True, "number": 2.5}
_NESTED = {"more": {"numbers": [1, 2.5, None, True], "text": "b"}}
_CONTENT = '{"key": "a \\"b\\" <c>"}'
_SCHEMA: dict[str, Any] = {"type": "object"}
_TYPES = {"key": "string", "flag": "boolean", "number": "number", "more": "object"}
_PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}, "required": []}
_TOOLS: list[Tool] = [
    {"type": "function", "function": {"name": "look_up", "description": "", "parameters": _PARAMETERS}}
]


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
    nested = {} if style.calls.tags is not None and not style.calls.tags.nested_json else _NESTED
    several: list[list[dict[str, Any]]] = [] if style.calls.between is None else [[_ARGUMENTS | nested], [{}]]
    for arguments in ([_ARGUMENTS | nested, *more] for more in ([], *several)):
        calls = [
            tool_call(f"call_{i}", "look_up", json.dumps(one, ensure_ascii=False)) for i, one in enumerate(arguments)
        ]
        answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        ids = answer_tokens(renderer, answer, _TOOLS)
        shape = AnswerShape(opening="closed", rule=CallRule("required"), arguments={"look_up": _PARAMETERS})
        if ids is None or not _matches(style, shape, ids, vocabulary):
            return "tool calls that its chat template writes do not match their grammar"
        read = parse(renderer, [], ids, _TOOLS).tool_calls  # without a prompt, which may have opened reasoning
        if [(call.name, json.loads(call.arguments)) for call in read] != [("look_up", one) for one in arguments]:
            return "tool calls that its chat template writes are not read back"
    return None


def _matches(style: AnswerStyle, shape: AnswerShape, token_ids: list[int], vocabulary: Vocabulary) -> bool:
    """Whether an answer matches its grammar, by itself or after reasoning: then it may begin with line breaks."""
    if _matches_now(style, shape, token_ids, vocabulary):
        return True
    before = () if style.reasoning is None else style.reasoning.after
    ended = [part for part in before if isinstance(part, int)]
    return len(ended) == 1 and _matches_now(style, replace(shape, opening="open"), ended + token_ids, vocabulary)


def _matches_now(style: AnswerStyle, shape: AnswerShape, token_ids: list[int], vocabulary: Vocabulary) -> bool:
    grammar = write_grammar(style, shape)
    try:
        matcher = vocabulary.matcher(grammar.text, grammar.stop_token_ids)
        return all(map(matcher.advance, token_ids))
    except ArtError:
        return False
