"""Requests that ask for a form get answers of this form, whatever the model's weights say, or a 400 that says why not."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art.errors import InvalidRequestError, ProcessError
from art.gateway import structures
from art.kernels.grammar import Vocabulary
from tests.support.forms import FORMAT, MOVE, TOOLS, is_move, open_form_bench, tool
from tests.support.gateway import QWEN3, Bench, accumulate, make_tokenizer, open_bench, user
from tools.families import real, templates

NAMED = {"type": "function", "function": {"name": "undo"}}
SEEDS = range(6)


@pytest.fixture
async def bench(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Bench]:
    async with open_form_bench(tmp_path, tokenizer_dir) as opened:
        yield opened


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def are_calls(message: dict[str, Any], *, names: tuple[str, ...] = ("play", "undo"), most: int = 99) -> bool:
    calls = calls_of(message)
    valid = all(name in names and is_move(arguments) for name, arguments in calls)
    return valid and 0 < len(calls) <= most and message["content"] is None


FORMS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, lambda m: isinstance(json.loads(m["content"]), dict)),
    "json_schema": ({"response_format": FORMAT}, lambda m: is_move(json.loads(m["content"]))),
    "guided_json": ({"guided_json": MOVE}, lambda m: is_move(json.loads(m["content"]))),
    "guided_regex": ({"guided_regex": "[ab]{3}/[0-9]"}, lambda m: bool(re.fullmatch("[ab]{3}/[0-9]", m["content"]))),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, lambda m: m["content"] in ("yes", "no")),
    "required": ({"tools": TOOLS, "tool_choice": "required"}, are_calls),
    "single": (
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, lambda m: are_calls(m, most=1)
    ),
    "named": ({"tools": TOOLS, "tool_choice": NAMED}, lambda m: are_calls(m, names=("undo",), most=1)),
    "calls or JSON": (
        {"tools": TOOLS, "response_format": FORMAT},
        lambda m: are_calls(m) if m.get("tool_calls") else is_move(json.loads(m["content"])),
    ),
    "JSON beside tools": (
        {"tools": TOOLS, "tool_choice": "none", "response_format": FORMAT}, lambda m: is_move(json.loads(m["content"]))
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_every_finished_answer_has_its_form(bench: Bench, form: str, streamed: bool) -> None:
    fields, is_right = FORMS[form]
    finished = 0
    for seed in SEEDS:
        if streamed:
            chunks = await bench.stream(user("hi"), seed=seed, max_tokens=200, **fields)
            message, reason = accumulate(chunks)
        else:
            answer = await bench.chat(user("hi"), seed=seed, max_tokens=200, **fields)
            message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
        if reason == "length":
            continue
        finished += 1
        assert is_right(message), message
        assert reason == ("tool_calls" if message.get("tool_calls") else "stop")
    assert finished > 0


async def test_the_record_says_what_the_answer_was_drawn_from(bench: Bench) -> None:
    answer = await bench.chat(user("hi"), tools=TOOLS, tool_choice=NAMED, logprobs=True, top_logprobs=20)
    made = bench.exchange(answer)
    request = bench.engine.requests[-1]
    end = bench.renderer.tokenizer.token_id("<|im_end|>")
    assert made.constraint.grammar == request.grammar
    assert made.constraint.stop_token_ids == [end] == list(request.stop_token_ids)  # as the template ends a turn
    assert made.constraint.kept is None
    vocabulary = Vocabulary(bench.renderer.tokenizer.backend.to_str(), bench.renderer.tokenizer.vocab_size)
    replay = vocabulary.replay(made.constraint.grammar, made.constraint.stop_token_ids, made.completion_token_ids)
    assert replay.num_matched == len(made.completion_token_ids)
    reports = answer["choices"][0]["logprobs"]["content"]
    assert all(len(report["top_logprobs"]) <= 20 for report in reports)
    assert [report["logprob"] for report in reports[-1]["top_logprobs"]] == [0.0]  # the only token that is allowed
    assert bench.exchange(await bench.chat(user("hi"), max_tokens=3)).constraint is None


async def test_truncation_is_recorded_token_by_token(bench: Bench) -> None:
    for cut in ({"top_k": 3}, {"min_p": 0.4}, {"top_p": 0.5}):
        made = bench.exchange(await bench.chat(user("hi"), max_tokens=12, **cut))
        assert len(made.constraint.kept) == len(made.completion_token_ids)
        for token, kept in zip(made.completion_token_ids, made.constraint.kept, strict=True):
            assert token in kept
            assert kept == sorted(kept)
            assert len(kept) <= 3 or "top_k" not in cut
        assert (made.constraint.grammar, made.constraint.stop_token_ids) == (None, [])
    assert bench.exchange(await bench.chat(user("hi"), max_tokens=3, top_k=-1, min_p=0)).constraint is None
    both = bench.exchange(await bench.chat(user("hi"), max_tokens=12, top_k=2, response_format=FORMAT))
    assert both.constraint.grammar is not None
    assert any(both.constraint.kept)


async def test_a_cut_answer_is_recorded_and_its_rest_is_content(bench: Bench) -> None:
    answer = await bench.chat(user("hi"), tools=TOOLS, tool_choice="required", max_tokens=8)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].lstrip().startswith("<tool_call>")
    assert bench.exchange(answer).constraint.grammar is not None


async def test_a_stop_string_may_cut_a_form(bench: Bench) -> None:
    answer = await bench.chat(user("hi"), response_format=FORMAT, stop=["row"])
    assert answer["choices"][0]["stop_reason"] == "row"
    assert answer["choices"][0]["message"]["content"].endswith('"')


async def test_strict_tools_are_kept_to_their_schema_while_text_stays_free(tmp_path: Path, tokenizer_dir: Path) -> None:
    texts: list[str] = []

    def script(request: Any) -> list[int]:
        return [*loaded.tokenizer.encode(texts.pop(0), add_special_tokens=False), request.stop_token_ids[0]]

    async with open_form_bench(tmp_path, tokenizer_dir, script) as bench:
        loaded = bench.renderer
        strict = [tool("play", strict=True), tool("undo", strict=True)]
        call = '<tool_call>\n{"name": "play", "arguments": {"column": "a", "row": 2}}\n</tool_call>'
        for text in ("It is done.", f"I play.\n{call}", f"{call}\n{call}", ""):
            texts[:] = [text]
            answer = await bench.chat(user("hi"), tools=strict)
            assert bench.exchange(answer).constraint.grammar is not None
            assert len(calls_of(answer["choices"][0]["message"])) == text.count("<tool_call>")
        for wrong in (call.replace("row", "line"), call.replace('"a"', '"z"'), call.replace("play", "stop")):
            texts[:] = [wrong]
            with pytest.raises(ProcessError, match="does not match its grammar"):
                await bench.chat(user("hi"), tools=strict)
        texts[:] = [f"{call}\n{call}"]
        with pytest.raises(ProcessError):
            await bench.chat(user("hi"), tools=TOOLS, parallel_tool_calls=False)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_the_grammar_refuses_is_never_recorded(
    tmp_path: Path, tokenizer_dir: Path, streamed: bool
) -> None:
    async with open_form_bench(tmp_path, tokenizer_dir, lambda request: [40, 41, request.stop_token_ids[0]]) as bench:
        with pytest.raises(ProcessError, match="token 0 of 3"):
            await (bench.stream if streamed else bench.chat)(user("hi"), response_format=FORMAT)
        assert bench.database.read("SELECT count(*) FROM exchanges") == [(0,)]


CALL = '{"name": "play", "arguments": {"column": "a", "row": 2}}'


@pytest.mark.parametrize(
    ("thinking", "text", "accepted"),
    [
        (True, f"<think>\nhm <b>\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", True),
        (True, f"<tool_call>\n{CALL}\n</tool_call>", True),
        (True, f"<think>\nhm</think><think></think><tool_call>\n{CALL}\n</tool_call>", False),
        (True, f"hm\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", False),
        (False, f"<tool_call>\n{CALL}\n</tool_call>", True),
        (False, f"<think>\nhm\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", False),
    ],
)
async def test_reasoning_comes_first_where_the_prompt_allows_it(
    tmp_path: Path, thinking: bool, text: str, accepted: bool
) -> None:
    folder = make_tokenizer(tmp_path / "model", template=QWEN3)

    def script(request: Any) -> list[int]:
        return [*bench.renderer.tokenizer.encode(text, add_special_tokens=False), request.stop_token_ids[0]]

    async with open_form_bench(tmp_path, folder, script, thinking=True) as bench:
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
        if not thinking:
            fields["chat_template_kwargs"] = {"enable_thinking": False}
        if not accepted:
            with pytest.raises(ProcessError):
                await bench.chat(user("hi"), **fields)
            return
        message = (await bench.chat(user("hi"), **fields))["choices"][0]["message"]
        assert calls_of(message) == [("play", {"column": "a", "row": 2})]
        assert ("reasoning_content" in message) == ("<think>" in text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": FORMAT}, "response_format.json_schema.schema"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
    ],
)
async def test_an_engine_that_cannot_refuses_by_name(
    tmp_path: Path, tokenizer_dir: Path, fields: dict[str, Any], param: str
) -> None:
    async with open_bench(tmp_path, tokenizer_dir) as plain:
        with pytest.raises(InvalidRequestError, match="engine") as caught:
            await plain.chat(user("hi"), **fields)
        assert caught.value.param == param
        assert plain.engine.requests == []
        plain.answers("ok")  # strict tools need no grammar to be served
        answer = await plain.chat(user("hi"), tools=[tool("play", strict=True)])
        assert plain.exchange(answer).constraint is None


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"guided_json": {"type": "object", "uniqueItems": True}}, "guided_json", 'Unimplemented keys: ["uniqueItems"]'),
        ({"guided_json": {"type": "array", "minItems": 2**40}}, "guided_json", "`minItems` is 1.1e+12; at most 1,024"),
        (
            {"guided_json": {"type": "object", "properties": {"a": {"anyOf": [{"type": "array", "maxItems": 1e9}]}}}},
            "guided_json", "`maxItems` is 1e+09",
        ),
        (
            {"tools": [tool("f", strict=True, parameters={"type": "object", "$defs": {"x": {"maxItems": 1025}}})]},
            "tools.0.function.parameters", "`maxItems` is 1025",
        ),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-ahead"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        (
            {"tools": [TOOLS[0], tool("f", strict=True, parameters={"type": "object", "not": {}})]},
            "tools.1.function.parameters", 'Unimplemented keys: ["not"]',
        ),
        (
            {"tools": [tool("f", strict=True, parameters={"type": "array"})]}, "tools.0.function.parameters",
            "arguments are an object",
        ),
    ],
)  # fmt: skip
async def test_what_llguidance_cannot_keep_is_refused_in_its_words(
    bench: Bench, fields: dict[str, Any], param: str, part: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(part)) as caught:
        await bench.chat(user("hi"), **fields)
    assert caught.value.param == param
    assert len(caught.value.message) < 800
    assert bench.engine.requests == []


async def test_a_tool_that_is_not_strict_may_have_any_schema(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "uniqueItems": True}
    answer = await bench.chat(
        user("hi"), tools=[tool("f", parameters=schema)], tool_choice="required", max_tokens=3, seed=1
    )
    assert '%json {"type": "object", "x-guidance"' in bench.exchange(answer).constraint.grammar


async def test_calls_with_a_tag_per_argument_cannot_be_enforced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    real.write_folder(folder, templates.QWEN3_CODER)
    async with open_form_bench(tmp_path, folder, thinking=True) as bench:
        for fields in ({"tool_choice": "required"}, {"parallel_tool_calls": False}, {"response_format": FORMAT}):
            with pytest.raises(
                InvalidRequestError, match=r'one JSON object; let the model choose \(`tool_choice="auto"`'
            ):
                await bench.chat(user("hi"), tools=TOOLS, **fields)
        answer = await bench.chat(user("hi"), response_format=FORMAT, tools=TOOLS, tool_choice="none")
        assert is_move(json.loads(answer["choices"][0]["message"]["content"]))
        assert warnings(caplog) == []
        for _ in range(2):
            answer = await bench.chat(user("hi"), tools=[tool("play", strict=True)], max_tokens=3)
            assert bench.exchange(answer).constraint is None
        (warning,) = warnings(caplog)
        assert warning.startswith("games/agent: strict tools are served as if they were not strict")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == structures.__name__]


async def test_strict_tools_without_a_grammar_are_named_once_for_each_model(
    tmp_path: Path, tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bench(tmp_path, tokenizer_dir) as plain:
        for name in ("agent", "agent", "other", "agent", "other"):
            plain.resolver.policy = replace(plain.resolver.policy, name=name)
            plain.answers("ok", "ok")
            await plain.chat(user("hi"), tools=[tool("play", strict=True)])
            await plain.chat(user("hi"), tools=TOOLS)
    assert [text.partition(":")[0] for text in warnings(caplog)] == ["games/agent", "games/other"]
    assert all("its engine does not sample under a grammar" in text for text in warnings(caplog))


async def test_grammars_are_compiled_outside_of_the_event_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    compile_one = Vocabulary.matcher

    def compile_here(self: Vocabulary, *args: Any) -> Any:
        threads.add(threading.get_ident())
        return compile_one(self, *args)

    monkeypatch.setattr(Vocabulary, "matcher", compile_here)
    bench.engine._vocabulary = None  # the engine would use a process of its own
    bench.engine._script = lambda request: [*bench.renderer.tokenizer.encode("yes"), request.stop_token_ids[0]]
    await asyncio.gather(*(bench.chat(user("hi"), guided_choice=["yes", "no"]) for _ in range(4)))
    assert threads
    assert threading.get_ident() not in threads


async def test_a_client_that_hangs_up_does_not_stop_others_from_learning_the_style(bench: Bench) -> None:
    first = asyncio.create_task(bench.chat(user("hi"), response_format=FORMAT))
    second = asyncio.create_task(bench.chat(user("hi"), response_format=FORMAT))
    await asyncio.sleep(0.001)
    first.cancel()
    assert (await second)["choices"][0]["finish_reason"] == "stop"
