"""Tool calls in the formats of model families are parsed from the template's own text, streamed or whole, and kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.errors import InvalidRequestError
from art.gateway.calls import ToolCall, with_call_ids
from art.gateway.fidelity import TOOL, examine, tool_conversations
from art.gateway.parse import Delta
from art.gateway.renderer import RecordedTurn, Renderer, load_renderer, parse, template_messages
from art.gateway.tool_calls import CALL_FORMATS
from art.protocol.answers import Branch
from art.protocol.chat import Message
from art.runtime.submission import check_tools
from tools.families.build import FAMILIES, build_tokenizer

READERS = {one.name: one.read for one in CALL_FORMATS}
FORMATS = {
    "Qwen2.5": "tagged",
    "Llama 3": "objects",
    "Mistral": "mistral",
    "DeepSeek-V3": "deepseek",
    "Kimi K2 (as DeepseekV3)": "kimi",
    "gpt-oss": "harmony",
}
F = ToolCall("f", '{"x": 1}')
G = ToolCall("g", "{}")
USER: Message = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    """A factory of renderers from a family's tokenizer and template."""
    made: dict[str, Renderer] = {}

    def get(name: str) -> Renderer:
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            build_tokenizer(next(family for family in FAMILIES if family.name == name)).save_pretrained(folder)
            loaded = load_renderer(folder)
            made[name] = loaded
        return made[name]

    return get


def parsed(renderer: Renderer, text: str, *, with_tools: bool = True) -> tuple[str, str, list[ToolCall]]:
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    message = parse(renderer, renderer.render([USER], None), ids, [TOOL] if with_tools else None)
    return message.content, message.reasoning or "", message.tool_calls


@pytest.mark.parametrize(("family", "name"), FORMATS.items())
def test_a_call_that_the_template_writes_is_parsed_back(
    family: str, name: str, renderer: Callable[[str], Renderer]
) -> None:
    loaded = renderer(family)
    assert loaded.handles_tools
    assert loaded.call_format == name
    assert check_tools(loaded).found == "calls come back as they were written"
    for conversation in tool_conversations():  # and none of them is a branch
        assert examine(loaded, conversation).branch is None


@pytest.mark.parametrize("family", ["Gemma 3", "Phi-3"])
def test_a_template_without_tools_does_not_handle_tools(family: str, renderer: Callable[[str], Renderer]) -> None:
    assert not renderer(family).handles_tools
    assert "the chat template has no place for tools" in check_tools(renderer(family)).found


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("objects", '{"name": "f", "parameters": {"x": 1}}', [F]),
        ("objects", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "arguments": {}}\n', [F, G]),
        ("objects", '{"name": "f", "parameters": {"x": 1}} and more', None),
        ("objects", '{"answer": 4}', None),
        ("objects", '{"name": "f", "parameters": [1]}', None),
        ("mistral", '[{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}, {"name": "g"}]', [F, G]),
        ("mistral", 'f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', [F, G]),
        ("mistral", 'f[ARGS]{"x": 1', None),
        ("mistral", 'f {"x": 1}', None),
        ("mistral", "[]", None),
        (
            "deepseek",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            [F, G],
        ),
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}', None),
        ("deepseek", "and so on", None),
        (
            "kimi",
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
            "<|tool_call_begin|> g:12 <|tool_call_argument_begin|> {} <|tool_call_end|>",
            [F, G],
        ),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>x<|tool_call_end|>", None),
        ("phi-4", '[{"name": "f", "arguments": {"x": 1}}]', [F]),
        ("phi-4", '{"name": "f", "arguments": {"x": 1}}', None),
        ("tagged", "", None),
    ],
)
def test_each_format_reads_its_calls(name: str, text: str, calls: list[ToolCall] | None) -> None:
    assert READERS[name](text, {}) == calls


def test_a_number_that_no_float_holds_is_the_largest_one() -> None:
    calls = READERS["phi-4"]('[{"name": "f", "arguments": {"x": 32e+6442, "y": -1e999}}]', {})
    assert calls is not None
    assert json.loads(calls[0].arguments) == {"x": sys.float_info.max, "y": -sys.float_info.max}


def test_without_tools_a_json_object_is_an_ordinary_answer(renderer: Callable[[str], Renderer]) -> None:
    llama, call = renderer("Llama 3"), '{"name": "f", "parameters": {"x": 1}}'
    assert parsed(llama, f" {call}\n") == ("", "", [F])
    assert parsed(llama, call, with_tools=False) == (call, "", [])
    for text in ('{"answer": 4}', f"So: {call}", " {", call[:-1]):
        assert parsed(llama, text) == (text, "", [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("Mistral", "I look. [TOOL_CALLS]f(x)"),
        ("DeepSeek-V3", "I <｜tool▁calls▁begin｜>look<｜tool▁calls▁end｜> now"),
        ("DeepSeek-V3", "I <｜tool▁calls▁begin｜>look"),
        ("Kimi K2 (as DeepseekV3)", "<|tool_calls_section_begin|><|tool_call_begin|>"),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>not JSON"),
        ("gpt-oss", " to=python<|channel|>commentary<|message|>1 + 1<|end|>"),
        ("gpt-oss", "no header"),
    ],
)
def test_a_malformed_call_stays_in_the_content(family: str, text: str, renderer: Callable[[str], Renderer]) -> None:
    assert parsed(renderer(family), text) == (text, "", [])


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("<|channel|>final<|message|> It is 2.\n", " It is 2.\n", "", []),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>2", "2", "Hm.", []),
        ("<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>2", "2", "Hm.", []),
        ("<|channel|>analysis<|message|>cut o", "", "cut o", []),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "", "Hm.", []),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
            ' to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
            "I look.",
            "a\nb",
            [F],
        ),
        (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', "", "", [F]),
        ("<|channel|>final<|message|>a<|channel|>b", "a<|channel|>b", "", []),
    ],
)
def test_harmony(
    text: str, content: str, reasoning: str, calls: list[ToolCall], renderer: Callable[[str], Renderer]
) -> None:
    assert parsed(renderer("gpt-oss"), text) == (content, reasoning, calls)


@pytest.mark.parametrize("family", ["Llama 3", "Mistral", "DeepSeek-V3", "Kimi K2 (as DeepseekV3)", "gpt-oss"])
def test_in_pieces_as_at_once(family: str, renderer: Callable[[str], Renderer]) -> None:
    """Property: for any order of the format's tokens, texts and calls, the deltas add up to the message."""
    loaded = renderer(family)
    prompt = loaded.render([USER], None)
    turn = loaded.completion([USER, tool_conversations()[1].answer], [TOOL])
    assert turn is not None
    tokens = list(loaded.tokenizer.backend.get_added_tokens_decoder())
    texts = [loaded.tokenizer.encode(text, add_special_tokens=False) for text in ("a\u00e9", " \n", '{"name": "f"}')]
    pieces = st.sampled_from([turn, *texts, *([token] for token in tokens)])

    @given(data=st.data())
    @settings(max_examples=60, deadline=None)
    def check(data: st.DataObject) -> None:
        ids = [token for piece in data.draw(st.lists(pieces, max_size=8)) for token in piece]
        whole = loaded.parser(prompt, [TOOL], parse_tools=True)
        whole.push(ids)
        expected = whole.finish()
        parser, deltas, position = loaded.parser(prompt, [TOOL], parse_tools=True), list[Delta](), 0
        while position < len(ids):
            size = data.draw(st.integers(1, 40))
            parser.push(ids[position : position + size])
            deltas += parser.take()
            position += size
        assert parser.finish() == expected
        deltas += parser.take()
        assert "".join(delta.content for delta in deltas) == expected.content
        assert "".join(delta.reasoning for delta in deltas) == (expected.reasoning or "")
        assert [delta.tool_call for delta in deltas if delta.tool_call] == expected.tool_calls
        assert Delta() not in deltas

    check()


def test_call_ids_have_the_form_that_templates_expect(renderer: Callable[[str], Renderer]) -> None:
    messages = [USER, *_called("call_1", "f"), *_called("call_2", "g")]
    by_name = {one.name: one for one in CALL_FORMATS}
    kimi = with_call_ids(messages, by_name["kimi"])
    assert [message["tool_calls"][0]["id"] for message in kimi[1::2]] == ["functions.f:0", "functions.g:1"]
    assert [message["tool_call_id"] for message in kimi[2::2]] == ["functions.f:0", "functions.g:1"]
    assert with_call_ids(messages, by_name["tagged"]) is messages
    without_id = [{**messages[1], "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}]
    assert with_call_ids(without_id, by_name["kimi"])[0]["tool_calls"][0]["id"] == "functions.f:0"
    text = renderer("Mistral").tokenizer.text(renderer("Mistral").render(messages, [TOOL]))
    ids = [call["id"] for part in text.split("[TOOL_CALLS]")[1:] for call in json.loads(part.split("</s>")[0])]
    assert [len(call_id) for call_id in ids] == [9, 9]
    assert all(f'"call_id": "{call_id}"' in text for call_id in ids)
    with pytest.raises(InvalidRequestError, match="9 characters"):  # without them it refuses
        renderer("Mistral").tokenizer.render_text(template_messages(messages), [TOOL], add_generation_prompt=True)


def _called(call_id: str, name: str) -> list[Message]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "found"},
    ]


def test_gpt_oss_keeps_reasoning_between_tool_calls(renderer: Callable[[str], Renderer]) -> None:
    """After a tool call, the next turn extends the sampled tokens with reasoning. After a final answer, it branches."""
    gpt_oss = renderer("gpt-oss")
    prompt = gpt_oss.render([USER], [TOOL])
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
    )
    completion = gpt_oss.tokenizer.encode(text + "{}<|call|>", add_special_tokens=False)
    assert completion[-1] in gpt_oss.stop_token_ids
    answer, result = _called("call_1", "f")
    turn = RecordedTurn([USER, answer | {"reasoning_content": "Hm."}], prompt, completion)
    extended = gpt_oss.bridge(turn, [result], [TOOL])
    assert not isinstance(extended, Branch)
    assert extended == gpt_oss.render([*turn.messages, result], [TOOL])
    assert extended[: len(prompt + completion)] == prompt + completion
    said = RecordedTurn([USER, {"role": "assistant", "content": "2"}], prompt, completion)
    assert gpt_oss.bridge(said, [USER], [TOOL]) == Branch("template_rewrites_history")


def test_arguments_are_passed_as_the_template_expects(renderer: Callable[[str], Renderer]) -> None:
    """DeepSeek's template takes arguments as text; the others take an object."""
    assert renderer("DeepSeek-V3").writing.text_arguments
    assert not renderer("Kimi K2 (as DeepseekV3)").writing.text_arguments


def test_calls_of_an_unknown_format_are_refused(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "Mistral")
    template = family.template.replace("[TOOL_CALLS][", "CALLS: ")
    build_tokenizer(replace(family, template=template)).save_pretrained(tmp_path)
    loaded = load_renderer(tmp_path)
    assert not loaded.handles_tools
    assert "writes tool calls in an unknown form" in check_tools(loaded).found
