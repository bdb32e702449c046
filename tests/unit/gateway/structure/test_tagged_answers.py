"""Requests that ask for calls get them from models whose calls have a tag per argument, whole or streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from art.errors import InvalidRequestError, ProcessError
from tests.support.forms import FORMAT, TOOLS, is_move, open_form_bench, tool
from tests.support.gateway import accumulate, user
from tools.families import real

SOURCES = {source.name: source for source in real.sources()}
NAMES = ["Qwen3.5-4B", "Qwen3-Coder", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "ling-3.0-flash", "MiniMax-M2"]
NAMED = {"type": "function", "function": {"name": "undo"}}
FORMS: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": NAMED},
    "single": {"tool_choice": "required", "parallel_tool_calls": False},
    "calls or JSON": {"response_format": FORMAT},
}


def folder_of(name: str, folder: Path) -> Path:
    path = folder / "model"
    path.mkdir()
    real.write_folder(SOURCES[name], path)
    return path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
async def test_every_finished_answer_has_its_form(name: str, form: str, tmp_path: Path) -> None:
    finished = 0
    thinking = "enable_thinking" not in SOURCES[name].template
    async with open_form_bench(tmp_path, folder_of(name, tmp_path), thinking=thinking) as bench:
        for seed in range(8):
            fields = {"tools": TOOLS, "seed": seed, "max_tokens": 400, **FORMS[form]}
            whole = await bench.chat(user("hi"), **fields)
            message, reason = whole["choices"][0]["message"], whole["choices"][0]["finish_reason"]
            streamed, same = accumulate(await bench.stream(user("hi"), **fields))
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            assert [call["function"] for call in streamed.get("tool_calls") or ()] == calls
            assert (same, streamed["content"] or None) == (reason, message["content"] or None)
            if reason == "length":
                continue
            finished += 1
            if form == "calls or JSON" and not calls:
                assert is_move(json.loads(message["content"]))
                continue
            assert calls
            assert len(calls) == 1 or form not in ("single", "named")
            assert all(is_move(json.loads(call["arguments"])) for call in calls)
            assert {call["name"] for call in calls} <= ({"undo"} if form == "named" else {"play", "undo"})
    assert finished > 0


async def test_strict_tools_are_kept_to_their_schema_while_text_stays_free(tmp_path: Path) -> None:
    texts: list[str] = []

    def script(request: Any) -> list[int]:
        return [*loaded.tokenizer.encode(texts.pop(0), add_special_tokens=False), request.stop_token_ids[0]]

    async with open_form_bench(tmp_path, folder_of("Qwen3.6", tmp_path), script) as bench:
        loaded = bench.renderer
        strict = [tool("play", strict=True), tool("undo", strict=True)]
        call = (
            "<tool_call>\n<function=play>\n<parameter=column>\na\n</parameter>\n<parameter=row>\n2\n</parameter>\n"
            "</function>\n</tool_call>"
        )
        for text in ("It is done.", f"I play.\n{call}", f"{call}\n{call}", ""):
            texts[:] = [text]
            answer = await bench.chat(user("hi"), tools=strict)
            assert bench.exchange(answer).constraint.grammar is not None
            calls = answer["choices"][0]["message"].get("tool_calls") or []
            assert [json.loads(one["function"]["arguments"]) for one in calls] == [
                {"column": "a", "row": 2}
            ] * text.count("<tool_call>")
        for old, new in (("row", "line"), ("\na\n", "\nz\n"), ("play", "stop"), ("2", "10"), ("2", "x")):
            texts[:] = [call.replace(old, new)]
            with pytest.raises(ProcessError, match="does not match its grammar"):
                await bench.chat(user("hi"), tools=strict)
        host = {"type": "object", "properties": {"host": {"type": "string", "format": "hostname"}}}
        with pytest.raises(InvalidRequestError, match="`format` 'hostname'") as caught:
            await bench.chat(user("hi"), tools=[tool("play", strict=True, parameters=host)])
        assert caught.value.param == "tools.0.function.parameters.properties.host"
