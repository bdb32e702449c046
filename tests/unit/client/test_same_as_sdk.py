"""The light path against OpenAI's client on the same scripted server: what the caller gets and what the server sees."""

from __future__ import annotations

import enum
import json
import logging
from typing import Any

import openai
import openai._base_client
import pydantic
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from tests.support.light_client import PLAIN, Watch, clients
from tests.support.scripted_chat import (
    COMPLETION,
    MESSAGE,
    ScriptedChat,
    answer,
    break_off,
    hang,
    hang_up,
    zipped,
)

SAID = PLAIN["messages"]
CHOICE = COMPLETION["choices"][0]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOKEN = {"token": "a", "bytes": [97], "logprob": -1, "top_logprobs": [], "token_id": 4}
SOON = {"retry_after_ms": "1"}
AWAY = answer(503, {"error": {"message": "away"}}, **SOON)


def changed(**fields: Any) -> dict[str, Any]:
    return COMPLETION | fields


def choice(**fields: Any) -> dict[str, Any]:
    return changed(choices=[CHOICE | fields])


READ_HERE: dict[str, Any] = {
    "plain": answer(),
    "request id": answer(x_request_id="r-1"),
    "charset": answer(content_type="application/json; charset=utf-8"),
    "tool calls": answer(body=choice(finish_reason="tool_calls", message=MESSAGE | {"tool_calls": [CALL]})),
    "log-probs": answer(body=choice(logprobs={"content": [TOKEN], "refusal": None})),
    "extras": answer(body=choice(message=MESSAGE | {"reasoning_content": "so", "deep": {"a": [1, {"b": None}]}})),
    "several": answer(body=changed(choices=[CHOICE, CHOICE | {"index": 1}])),
    "other letters": answer(body=choice(message=MESSAGE | {"content": "é 漢 \U0001f600 \x00"})),
}
"""Answers that the light path reads itself."""
HANDED_OVER: dict[str, Any] = {
    "unknown finish": answer(body=choice(finish_reason="tired")),
    "no choices": answer(body={"id": "x"}),
    "broken JSON": answer(body=b'{"id": '),
    "not UTF-8": answer(
        body=json.dumps(choice(message=MESSAGE | {"content": "é"}), ensure_ascii=False).encode("latin-1")
    ),
    "text": answer(body=b"hello", content_type="text/plain"),
    "gzip": zipped(),
    "no content": answer(204, b""),
    "redirect": [answer(307, b"", location="/v2/chat/completions")],
    "bad request": answer(400, {"error": {"message": "no", "type": "t", "param": "p", "code": "c"}}),
    "unauthorised": answer(401, {"error": {"message": "no"}}),
    "conflict": [answer(409, {}, **SOON)],
    "too many": [answer(429, {"error": {"message": "slow"}}, **SOON), answer(429, {}, **SOON)],
    "too many, later": answer(429, {}, retry_after="999"),
    "away once": [AWAY],
    "away for ever": AWAY,
    "must retry": [answer(400, {}, x_should_retry="true", **SOON)],
    "hangs up once": [hang_up],
    "breaks off for ever": break_off,
    "several troubles": [hang_up, AWAY, answer(body={"id": "x"})],
}
"""Ends of a first attempt from which the SDK goes on."""


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr(openai._base_client, "MAX_RETRY_DELAY", 0.001)


async def ends(server: ScriptedChat, client: AsyncOpenAI, behaviour: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What came of one call, and what the server saw."""
    server.script, server.then = (list(behaviour), answer()) if isinstance(behaviour, list) else ([], behaviour)
    server.seen.clear()
    end: dict[str, Any]
    try:
        result = await client.chat.completions.create(**arguments)
        end = {"result": described(result)}
    except Exception as error:
        end = {"error": described_error(error)}
    requests = [
        (seen.path, {name.lower(): text for name, text in seen.headers.items() if name != "Content-Length"},
         json.loads(seen.body))
        for seen in server.seen
    ]  # fmt: skip
    return end | {"requests": requests}


async def compare(
    server: ScriptedChat, pair: tuple[AsyncOpenAI, AsyncOpenAI], watch: Watch, behaviours: dict[str, Any],
    arguments: dict[str, Any], expected_way: tuple[int, int],
) -> dict[str, Any]:  # fmt: skip
    """Differences between the stock client and the light one, and between ways expected and taken, by name."""
    differences = {}
    for name, behaviour in behaviours.items():
        watch.light = watch.handed_over = 0
        stock, light = [await ends(server, client, behaviour, arguments_of(arguments)) for client in pair]
        way = (watch.light, watch.handed_over)
        if stock != light or way != expected_way:
            differences[name] = (stock, light, way)
    return differences


def arguments_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of one call: `None` for messages means a generator, `...` means none."""
    if changes.get("messages", 0) is None:
        changes = changes | {"messages": (message for message in SAID)}
    return {key: value for key, value in changes.items() if value is not ...}


def described(result: Any) -> Any:
    if not isinstance(result, ChatCompletion):
        return result
    return type(result), repr(result), result.to_dict(), result.to_json(), result._request_id


def described_error(error: BaseException | None) -> Any:
    if error is None:
        return None
    request, response = getattr(error, "request", None), getattr(error, "response", None)
    return {
        "class": type(error), "text": str(error), "body": getattr(error, "body", None),
        "code": getattr(error, "code", None), "request": request and (request.method, str(request.url)),
        "asked": request and json.loads(request.content or b"null"),
        "answer": response and (response.status_code, response.text, response.reason_phrase, len(response.history)),
        "answer headers": response and sorted(set(response.headers) - {"date"}),
        "cause": described_error(error.__cause__),
    }  # fmt: skip


async def test_answers_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = {}
    async with ScriptedChat().running() as server, clients(server.base_url, monkeypatch, max_retries=2) as pair:
        watch = Watch(monkeypatch)
        for name, behaviour in (READ_HERE | HANDED_OVER).items():
            differences |= await compare(server, pair, watch, {name: behaviour}, PLAIN, (1, int(name in HANDED_OVER)))
    assert differences == {}


async def test_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_retries": 2, "timeout": 0.2}
    async with ScriptedChat().running() as server, clients(server.base_url, monkeypatch, **options) as pair:
        watch = Watch(monkeypatch)
        assert await compare(server, pair, watch, {"once": [hang]}, PLAIN, (1, 1)) == {}
        assert await compare(server, pair, watch, {"for ever": hang}, PLAIN, (1, 1)) == {}


async def test_a_cookie_is_sent_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedChat().running() as server, clients(server.base_url, monkeypatch) as pair:
        watch = Watch(monkeypatch)
        cookie = answer(set_cookie="a=b; Path=/")
        assert await compare(server, pair, watch, {"set": cookie}, PLAIN, (1, 1)) == {}
        assert await compare(server, pair, watch, {"sent": answer()}, PLAIN, (0, 0)) == {}
        assert server.seen[0].headers["Cookie"] == "a=b"


class Role(enum.Enum):
    USER = "user"


class Text(str):
    """A subclass, which may have any behaviour."""


ANSWERED = ChatCompletion.model_validate(
    choice(finish_reason="tool_calls", message=MESSAGE | {"tool_calls": [CALL], "reasoning_content": "so"})
)
LIGHT_ARGUMENTS: dict[str, dict[str, Any]] = {
    "sampling": {"temperature": 0.7, "top_p": 1, "max_tokens": 5, "seed": 3, "stop": ["a"], "n": 2, "logprobs": True},
    "stream off": {"stream": False},
    "None": {"temperature": None, "stop": None},
    "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"minimum": 0.5}}}]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    "letters": {"messages": [{"role": "user", "content": 'é 漢 \U0001f600 \x00 "\\/'}]},
    "answered": {
        "messages": [*SAID, ANSWERED.choices[0].message, {"role": "tool", "tool_call_id": "c", "content": ""}]
    },
    "answered calls": {"messages": [{"role": "assistant", "tool_calls": ANSWERED.choices[0].message.tool_calls}]},
    "unknown keys inside": {"messages": [{"role": "user", "content": "x", "more": {"a": [1, None, True, 2.5]}}]},
}
STOCK_ARGUMENTS: dict[str, dict[str, Any]] = {
    "generator": {"messages": None},
    "tuple": {"messages": tuple(SAID)},
    "omitted": {"temperature": openai.omit, "messages": [{"role": "user", "content": "x", "name": openai.omit}]},
    "NaN": {"temperature": float("nan")},
    "half a pair": {"messages": [{"role": "user", "content": "\ud800"}]},
    "enum": {"messages": [{"role": Role.USER, "content": "x"}]},
    "pydantic class": {"response_format": pydantic.create_model("Form", x=(int, 1))},
    "unknown argument": {"top_k": 5},
    "extra body": {"extra_body": {"top_k": 5}},
    "extra headers": {"extra_headers": {"x-mine": "1", "User-Agent": "me"}},
    "a time limit": {"timeout": 3.0},
    "no messages": {"messages": ...},
}


async def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = {}
    async with ScriptedChat().running() as server, clients(server.base_url, monkeypatch) as pair:
        watch = Watch(monkeypatch)
        for name, changes in (LIGHT_ARGUMENTS | STOCK_ARGUMENTS).items():
            way = (int(name in LIGHT_ARGUMENTS), 0)
            differences |= await compare(server, pair, watch, {name: answer()}, PLAIN | changes, way)
    assert differences == {}


async def test_raw_responses_streams_and_positional_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
    stream = answer(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), content_type="text/event-stream")
    async with ScriptedChat().running() as server, clients(server.base_url, monkeypatch) as pair:
        watch = Watch(monkeypatch)
        for client in pair:
            server.then = answer(x_mine="1")
            raw = await client.chat.completions.with_raw_response.create(**PLAIN)
            assert (raw.headers["x-mine"], raw.parse().id) == ("1", "chatcmpl-1")
            async with client.chat.completions.with_streaming_response.create(**PLAIN) as streamed:
                assert (await streamed.parse()).id == "chatcmpl-1"  # type: ignore[attr-defined]
            assert (await client.chat.completions.parse(**PLAIN)).choices[0].message.parsed is None
            server.then = stream
            assert [part.id async for part in await client.chat.completions.create(**PLAIN, stream=True)] == ["x"]
            with pytest.raises(TypeError, match="argument"):
                await client.chat.completions.create("p/m")  # type: ignore[call-overload]
        assert watch.light == 0


async def test_copies_send_what_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "api_key": "other", "organization": "o", "project": "q", "timeout": 7.5,
        "default_headers": {"x-mine": "1"}, "default_query": {"a": "b"},
    }  # fmt: skip
    async with ScriptedChat().running() as server, clients(server.base_url, monkeypatch, **options) as (stock, light):
        watch = Watch(monkeypatch)
        expected = await ends(server, stock, answer(), PLAIN)
        assert expected["requests"][0][0] == "/v1/chat/completions?a=b"
        assert (
            expected["requests"][0][1] | {"x-mine": "1", "authorization": "Bearer other"} == expected["requests"][0][1]
        )
        assert await ends(server, light, answer(), PLAIN) == expected
        assert watch.light == 1


async def test_a_changed_client_is_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"default_headers": {"x-mine": "1"}}
    async with ScriptedChat().running() as server, clients(server.base_url, monkeypatch, **options) as pair:
        watch = Watch(monkeypatch)
        for change in (
            lambda client: setattr(client, "api_key", "new"),
            lambda client: setattr(client, "timeout", 9.0),
            lambda client: setattr(client, "organization", "o"),
            lambda client: setattr(client, "base_url", f"{server.base_url}/more"),
            lambda client: client._custom_headers.update({"x-mine": "2"}),
            lambda client: client._client.headers.update({"accept-language": "de"}),
            lambda client: client.responses,  # makes a part of the client, which changes nothing
        ):
            for client in pair:
                change(client)
            assert await compare(server, pair, watch, {"changed": answer()}, PLAIN, (0, 0)) == {}
            assert await compare(server, pair, watch, {"learned": answer()}, PLAIN, (1, 0)) == {}


async def test_the_log_tells_of_each_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedChat().running() as server, clients(server.base_url, monkeypatch) as pair:
        lines = []
        for client in pair:
            with caplog.at_level(logging.INFO):
                caplog.clear()
                await client.chat.completions.create(**PLAIN)
                lines.append(
                    [(r.name, r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("httpx")]
                )
        assert lines[0] == lines[1] != []
        watch = Watch(monkeypatch)
        with caplog.at_level(logging.DEBUG, logger="openai"):  # the SDK tells much more
            await pair[1].chat.completions.create(**PLAIN)
        assert watch.light == 0
