"""Calls come back from chat templates, streamed or whole: from our own, and from those of published models.

The published ones are here only after `make families`; docs/models.md says what comes of each.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from art.errors import InvalidRequestError
from art.gateway.parse import Delta
from art.gateway.renderer import Renderer, load_renderer, parse
from tools.families import real, templates

PAGE = (Path(__file__).parents[4] / "docs/models.md").read_text()
SOURCES = {source.name: source for source in real.sources()}
OWN = {
    "functions": templates.QWEN3_CODER,
    "tagged": templates.FALCON,
    "objects": templates.LLAMA3,
    "deepseek": templates.DEEPSEEK,
    "kimi": templates.KIMI,
    "harmony": templates.GPT_OSS,
}
"""Own templates, by the format of calls that is found."""
XML = ["Qwen3-Coder", "Qwen3.5-4B", "Qwen3.6", "Qwen3.8", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "StepFun3.5-Flash"]
FORMATS = {
    **dict.fromkeys(XML, "functions"),
    "ByteDance-Seed-OSS": "seed",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "MiniMax-M2": "minimax-m2",
    "c4ai-command-r7b-12-2024-tool_use": "cohere",
    "LFM2-1.2B": "lfm2",
    "gemma-4-E2B-it": "gemma-4",
    "granite-3.3-2B-Instruct": "granite",
    "granite-4.0": "tagged",
    "Falcon-H1": "tagged",
    "Qwen3-0.6B": "tagged",
    "Llama-3.1-8B-Instruct": "objects",
    "Mistral-Nemo-Instruct-2407": "mistral",
    "Kimi-K2": "kimi",
    "gpt-oss-120b": "harmony",
}
published = pytest.mark.skipif(not real.are_fetched(), reason="templates are not downloaded: `make families`")


def load(name: str) -> Renderer:
    if name in OWN:
        return real.load(OWN[name])
    return real.load(SOURCES[name].file.read_text(encoding="utf-8"), SOURCES[name].tokens)


@pytest.mark.parametrize(
    ("name", "call_format"),
    [*zip(OWN, OWN, strict=True), *(pytest.param(*one, marks=published) for one in FORMATS.items())],
)
def test_the_format_is_found_and_streams_as_it_parses(name: str, call_format: str) -> None:
    renderer = load(name)
    assert renderer.handles_tools
    assert renderer.call_format == call_format
    for case, message in real.answers().items():
        if case == "several" and not renderer.writing.is_parallel:
            continue
        assert real.comes_back(renderer, message), case
        written = real.written(renderer, message)
        assert written is not None
        prompt, ids = written
        expected = parse(renderer, prompt, ids, [real.TYPED_TOOL])
        if ids[-1] in renderer.stop_token_ids:
            ids = ids[:-1]
        for size in (1, 7):
            parser = renderer.parser(prompt, [real.TYPED_TOOL], parse_tools=True)
            deltas = list[Delta]()
            for start in range(0, len(ids), size):
                parser.push(ids[start : start + size])
                deltas += parser.take()
            assert parser.finish() == expected
            deltas += parser.take()
            assert "".join(delta.content for delta in deltas) == expected.content
            assert [delta.tool_call for delta in deltas if delta.tool_call] == expected.tool_calls


@published
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_the_page_says_what_comes_of_a_template(name: str) -> None:
    assert f"| {' | '.join(real.check(SOURCES[name]))} |\n" in PAGE


def test_xml_calls_are_no_content() -> None:
    """A vocabulary with <tool_call> is not enough to take the calls for JSON."""
    renderer = load("functions")
    text = (
        "<tool_call>\n<function=look_up>\n<parameter=key>\n5\n</parameter>\n<parameter=number>\n5\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    message = parse(renderer, [], ids, [real.TYPED_TOOL])
    assert message.content == ""
    assert json.loads(message.tool_calls[0].arguments) == {"key": "5", "number": 5}


def test_without_a_format_that_fits_tools_are_refused(tmp_path: Path) -> None:
    """Its vocabulary has <tool_call>, but nothing reads what its template writes."""
    real.write_folder(tmp_path, templates.QWEN3_CODER.replace("<function=' + call", "<call ' + call"))
    renderer = load_renderer(tmp_path)
    assert renderer.tokenizer.token_id("<tool_call>") is not None
    assert not renderer.handles_tools


@pytest.mark.parametrize("name", [
    "objects", "tagged",
    *(pytest.param(name, marks=published) for name in ("Falcon-H1", "granite-3.3-2B-Instruct", "LFM2-8B-A1B")),
])  # fmt: skip
def test_calls_that_a_template_does_not_write_stay_in_later_prompts(name: str) -> None:
    renderer = load(name)
    calls = real.answer([real.SIMPLE, real.HARD])
    results = [
        {"role": "tool", "tool_call_id": f"call_{number}", "name": "look_up", "content": f"found {number}"}
        for number in (0, 1)
    ]
    prompt = renderer.tokenizer.text(renderer.render([real.USER, calls, *results], [real.TYPED_TOOL]))
    answered = prompt[prompt.index("Look it up.") :]
    assert answered.count("look_up") == 2
    assert answered.index("look_up") < answered.index("found 0") < answered.index("found 1")


def test_a_template_that_writes_one_call_refuses_several() -> None:
    with pytest.raises(InvalidRequestError, match=r"a message has 2 tool calls, but .* writes one call per message"):
        load("harmony").render([real.USER, real.answer([real.SIMPLE, real.HARD])], [real.TYPED_TOOL])


def test_a_type_on_which_a_template_recurses_without_end_is_refused() -> None:
    macro = "{%- macro kind(of) %}{{ kind(of) }}{% endmacro %}{%- if tools %}{{ kind(tools[0]) }}{% endif %}"
    renderer = real.load(macro + templates.QWEN2)
    with pytest.raises(InvalidRequestError, match="does not accept these messages"):
        renderer.tokenizer.render_text([real.USER], [real.TYPED_TOOL], add_generation_prompt=True)
