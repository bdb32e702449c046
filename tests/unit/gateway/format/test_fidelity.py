"""The checks of a model's text format report what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from art.gateway.calls import ToolCall
from art.gateway.fidelity import examine, plain_conversations, reasoning_conversation, tool_conversations
from art.gateway.parse import ParsedMessage
from art.gateway.renderer import Renderer, load_renderer
from art.runtime.submission import check_template, check_tools
from tests.support.gateway import CHATML, QWEN3, make_tokenizer

TOOL_CALL = tool_conversations()[1]


@pytest.fixture
def renderer(tokenizer_dir: Path) -> Renderer:
    return load_renderer(tokenizer_dir)


def renderer_of(tmp_path: Path, template: str) -> Renderer:
    return load_renderer(make_tokenizer(tmp_path / "model", template=template))


@pytest.mark.parametrize("template", [CHATML, QWEN3])
def test_a_good_format_passes(tmp_path: Path, template: str) -> None:
    renderer = renderer_of(tmp_path, template)
    for conversation in (*plain_conversations(), *tool_conversations()):
        examined = examine(renderer, conversation)
        assert examined == type(examined)(conversation.name)
    assert examine(renderer, reasoning_conversation()).branch == "reasoning_dropped"
    assert check_template(renderer).status == "ok"
    assert "branches (reasoning_dropped)" in check_template(renderer).found
    assert check_tools(renderer).status == "ok"


class Sabotaged:
    """A renderer with one method replaced."""

    def __init__(self, renderer: Renderer, **replaced: Any) -> None:
        self._renderer = renderer
        self.__dict__ |= replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)


def test_changed_tokens_in_the_next_turn_are_reported(renderer: Renderer) -> None:
    more = renderer.tokenizer.encode("more", add_special_tokens=False)

    def shifted(*arguments: Any) -> Any:
        extended = renderer.bridge(*arguments)
        return extended[1:] if isinstance(extended, list) else extended

    def otherwise(*arguments: Any) -> Any:
        extended = renderer.bridge(*arguments)
        return extended + more if isinstance(extended, list) else extended

    check = check_template(Sabotaged(renderer, bridge=shifted))
    assert (check.status, check.found[:9]) == ("failure", "two turns")
    assert "does not begin with the recorded tokens" in check.found
    assert "but the template writes" in check_template(Sabotaged(renderer, bridge=otherwise)).found


class Parser:
    """A parser that returns a fixed message for any tokens."""

    def __init__(self, message: ParsedMessage) -> None:
        self.message = message

    def push(self, token_ids: list[int]) -> None:
        pass

    def finish(self) -> ParsedMessage:
        return self.message


def parsing_as(renderer: Renderer, message: ParsedMessage) -> Any:
    return Sabotaged(renderer, parser=lambda *_, **__: Parser(message))


def test_a_text_that_is_parsed_differently_is_reported(renderer: Renderer) -> None:
    check = check_template(parsing_as(renderer, ParsedMessage("It is 3.")))
    assert check.status == "failure"
    assert "came back from the parser as 'It is 3.'" in check.found


@pytest.mark.parametrize(
    "message",
    [
        ParsedMessage("I look."),
        ParsedMessage("I look.", tool_calls=[ToolCall("look_up", '{"key": "a"}')]),
        ParsedMessage("I look.", tool_calls=[ToolCall("look", "{}")]),
    ],
)
def test_a_tool_call_that_is_parsed_differently_is_reported(renderer: Renderer, message: ParsedMessage) -> None:
    problem = examine(parsing_as(renderer, message), TOOL_CALL).parse_problem
    assert problem is not None
    assert problem.startswith("the answer's tool calls")
    assert check_tools(parsing_as(renderer, message)).status == "failure"


def test_reasoning_that_is_parsed_as_text_is_reported(renderer: Renderer) -> None:
    message = ParsedMessage("It is 4.")
    assert "the answer's reasoning" in (
        examine(parsing_as(renderer, message), reasoning_conversation()).parse_problem or ""
    )


def test_a_template_without_a_turn_end_makes_branches(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    check = check_template(renderer_of(tmp_path, template))
    assert check.status == "warning"
    assert check.remedy is not None


def test_a_template_that_opens_reasoning_for_the_answer_only(tmp_path: Path) -> None:
    opening = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}")
    assert opening != CHATML
    check = check_template(renderer_of(tmp_path, opening))
    assert check.status == "warning"
    assert "does not continue their prompt" in check.found


def test_a_template_that_refuses_everything_fails(tmp_path: Path) -> None:
    check = check_template(renderer_of(tmp_path, "{{ raise_exception('no') }}"))
    assert check.status == "failure"
    assert "does not accept these messages" in check.found


def test_a_template_without_tools_warns(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = renderer_of(tmp_path, template)
    assert check_template(renderer).status == "ok"
    assert check_tools(renderer).status == "warning"


def test_a_refused_conversation_is_reported(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    renderer = renderer_of(tmp_path, template)
    assert "no system" in (examine(renderer, plain_conversations()[1]).refused or "")
    assert "it does not support a system message" in check_template(renderer).found
