"""What templates of model families write around calls and content is found, and proved by a grammar made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art.gateway.answer_style import AnswerStyle, CallStyle, Pattern, find_style, opening_of
from art.gateway.grammar import AnswerShape, write_grammar
from art.gateway.renderer import Renderer, load_renderer
from art.gateway.structures import find_problems
from art.kernels.grammar import Vocabulary
from art.protocol.chat_completions import CallRule
from art.testing.tiny_model import build_tiny_model
from tests.support.driving import TOOLS, warm_start_conversations
from tests.support.gateway import QWEN3, make_tokenizer
from tools.families.build import FAMILIES, build_tokenizer

NAMES = [family.name for family in FAMILIES]
WITHOUT_TOOLS = {"Gemma 3", "Phi-3"}
MANY = {"Qwen2.5", "Qwen3", "Qwen3-MoE", "Mistral", "DeepSeek-V3", "Llama 3", "Kimi K2 (as DeepseekV3)"}
"""Families that write several calls in one answer."""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    made: dict[str, Renderer] = {}

    def get(name: str) -> Renderer:
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            build_tokenizer(next(family for family in FAMILIES if family.name == name)).save_pretrained(folder)
            made[name] = load_renderer(folder)
        return made[name]

    return get


def problems(renderer: Renderer, style: AnswerStyle) -> tuple[str | None, str | None]:
    tokenizer = renderer.tokenizer
    return find_problems(renderer, style, Vocabulary(tokenizer.backend.to_str(), tokenizer.vocab_size))


@pytest.mark.parametrize("name", NAMES)
def test_answers_of_a_family_match_the_grammar_made_of_its_template(
    name: str, renderer: Callable[[str], Renderer]
) -> None:
    loaded = renderer(name)
    style = find_style(loaded)
    content, calls = problems(loaded, style)
    assert content is None
    assert (style.calls is None) == (name in WITHOUT_TOOLS)
    assert "one JSON object" in calls if calls else name not in WITHOUT_TOOLS
    if style.calls is not None:
        assert (style.calls.between is not None) == (name in MANY)
        assert style.calls.end in loaded.stop_token_ids


def test_ids_of_calls_are_patterns(renderer: Callable[[str], Renderer]) -> None:
    mistral, kimi = (find_style(renderer(name)).calls for name in ("Mistral", "Kimi K2 (as DeepseekV3)"))
    assert mistral is not None
    assert kimi is not None
    assert Pattern("[a-zA-Z0-9]{9}") in mistral.tail
    assert Pattern("[0-9]{1,3}") in kimi.middle


def test_harmony_has_its_own_ends_for_content_and_calls(renderer: Callable[[str], Renderer]) -> None:
    loaded = renderer("gpt-oss")
    style, token_id = find_style(loaded), loaded.tokenizer.token_id
    assert style.calls is not None
    assert (style.content.ends, style.calls.end) == ((token_id("<|return|>"),), token_id("<|call|>"))
    assert style.content.head == (token_id("<|channel|>"), "final", token_id("<|message|>"))


@pytest.mark.parametrize("change", ["head", "middle", "tail", "end", "between"])
def test_a_style_that_is_not_the_templates_is_not_proved(change: str, renderer: Callable[[str], Renderer]) -> None:
    loaded = renderer("Qwen2.5")
    style = find_style(loaded)
    assert style.calls is not None
    wrong: dict[str, object] = {"head": ("x",), "middle": ("",), "tail": (), "end": 0, "between": ("\n",)}
    calls: CallStyle = replace(style.calls, **{change: wrong[change]})  # type: ignore[arg-type] # one of several types
    assert problems(loaded, replace(style, calls=calls)) == (
        None, "tool calls that its chat template writes do not match their grammar"
    )  # fmt: skip


TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}\\n
{%- if m.role == 'assistant' and m.reasoning_content %}<think>\\n{{ m.reasoning_content }}\\n</think>\\n\\n{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson(separators=(',', ':')) }}</tool_call>{% endfor %}<|im_end|>\\n
{%- endfor %}{{ tools }}
{%- if add_generation_prompt %}<|im_start|>assistant\\n<think>\\n{% endif %}"""
"""Opens reasoning in every prompt and writes compact JSON. Only an answer with reasoning continues its prompts."""


def test_a_template_that_opens_reasoning_in_every_prompt(tmp_path: Path) -> None:
    template = TEMPLATE.replace("{{ tools }}", "").replace("{%- for m", "{% if tools %}T{% endif %}{%- for m", 1)
    loaded = load_renderer(make_tokenizer(tmp_path, template=template))
    style = find_style(loaded)
    assert style.calls is not None
    assert (style.calls.item_separator, style.calls.key_separator) == (",", ":")
    assert problems(loaded, style) == (None, None)
    prompt = loaded.render([{"role": "user", "content": "hi"}], None)
    assert opening_of(loaded, prompt) == "open"


def test_openings_of_prompts(tmp_path: Path) -> None:
    loaded = load_renderer(make_tokenizer(tmp_path, template=QWEN3))
    asked = [{"role": "user", "content": "hi"}]
    assert opening_of(loaded, loaded.render(asked, None)) == "may"
    closed = loaded.with_kwargs({"enable_thinking": False})
    assert opening_of(closed, closed.render(asked, None)) == "closed"
    said = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    turns = [{"role": "user", "content": "a"}, said]
    short = loaded.render(turns, None)  # reasoning of the turn before does not count
    assert opening_of(loaded, short) == "may"


def test_a_template_whose_prompts_end_with_reasoning_that_answers_lack(tmp_path: Path) -> None:
    loaded = load_renderer(make_tokenizer(tmp_path)).with_kwargs({"enable_thinking": False})
    assert loaded.completion([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None) is None
    style = find_style(loaded)
    assert style.calls is not None
    assert style.content.ends == (loaded.tokenizer.token_id("<|im_end|>"),)
    assert problems(loaded, style) == (None, None)


def test_a_tiny_model_may_write_calls_in_the_tokens_that_it_was_taught(tmp_path: Path) -> None:
    """One token is the text from `{"name": "drive"` on. llguidance by itself would force smaller ones."""
    conversations = warm_start_conversations("tool", seed=0, count=50)
    loaded = load_renderer(
        build_tiny_model(tmp_path / "model", conversations=conversations, warm_start_steps=0)
    ).with_kwargs({"enable_thinking": False})
    style = find_style(loaded)
    assert style.whole_pieces
    vocabulary = Vocabulary(loaded.tokenizer.backend.to_str(), loaded.tokenizer.vocab_size)
    arguments = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    shape = AnswerShape(opening="closed", rule=CallRule("required"), arguments=arguments)
    for free, matches in ((True, True), (False, False)):
        grammar = write_grammar(replace(style, whole_pieces=free), shape)
        for conversation in conversations:
            messages: list[Any] = list(conversation.messages)
            tokens = loaded.completion(messages, TOOLS)
            assert tokens is not None
            replay = vocabulary.replay(grammar.text, grammar.stop_token_ids, tokens)
            assert (replay.num_matched == len(tokens)) == matches


def test_a_tokenizer_of_merged_tokens_has_no_whole_pieces(tmp_path: Path) -> None:
    loaded = load_renderer(make_tokenizer(tmp_path))
    assert not loaded.tokenizer.has_whole_pieces
    shape = AnswerShape(opening="closed", rule=CallRule("required"), arguments={"f": {"type": "object"}})
    assert "no_forcing" not in write_grammar(find_style(loaded), shape).text
