"""Captures of clients that ART has not made: any OpenAI client, plain httpx; and what a capture that took nothing says."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx
import httpx2
import openai
import pytest

import art
from art.messages import is_choice
from tests.support.app import KEY
from tests.support.gateway import user
from tests.support.served_app import ServedApp

NAME = "games/agent"
AUTH = {"authorization": f"Bearer {KEY}"}
SENDS = [library_client.send for library_client in (httpx.AsyncClient, httpx.Client, httpx2.AsyncClient, httpx2.Client)]


@pytest.fixture(autouse=True)
def nothing_stays_replaced() -> Any:
    yield
    clients = (httpx.AsyncClient, httpx.Client, httpx2.AsyncClient, httpx2.Client)
    assert [client.send for client in clients] == SENDS


async def ask_openai(url: str, messages: list[Any], stream: bool, http_client: Any = None) -> str:
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, http_client=http_client) as client:
        answer = await client.chat.completions.create(model=NAME, messages=messages, stream=stream)  # type: ignore[call-overload]
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])


async def ask_openai_by_aiohttp(url: str, messages: list[Any], stream: bool) -> str:
    if openai.__version__.startswith("2."):
        pytest.importorskip("httpx_aiohttp", reason="openai 2 needs it for aiohttp")
    return await ask_openai(url, messages, stream, openai.DefaultAioHttpClient())


async def ask_blocking_openai(url: str, messages: list[Any], stream: bool) -> str:
    def ask() -> str:
        with openai.OpenAI(base_url=url, api_key=KEY) as client:
            answer = client.chat.completions.create(model=NAME, messages=messages, stream=stream)  # type: ignore[call-overload]
            if not stream:
                return str(answer.choices[0].message.content)
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)

    return await asyncio.to_thread(ask)


def body(messages: list[Any], stream: bool) -> dict[str, Any]:
    return {"model": NAME, "messages": messages, "stream": stream}


def pieces(lines: list[str]) -> str:
    chunks = [json.loads(line[5:]) for line in lines if line.startswith("data:") and "[DONE]" not in line]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def asker(library: Any) -> Callable[..., Any]:
    async def ask(url: str, messages: list[Any], stream: bool) -> str:
        async with library.AsyncClient(headers=AUTH, timeout=30) as client:
            if not stream:
                answer = await client.post(f"{url}/chat/completions", json=body(messages, stream))
                return str(answer.json()["choices"][0]["message"]["content"])
            async with client.stream("POST", f"{url}/chat/completions", json=body(messages, stream)) as answer:
                return pieces([line async for line in answer.aiter_lines()])

    return ask


def blocking_asker(library: Any) -> Callable[..., Any]:
    async def ask(url: str, messages: list[Any], stream: bool) -> str:
        def post() -> str:
            answer = library.post(f"{url}/chat/completions", json=body(messages, stream), headers=AUTH, timeout=30)
            return pieces(answer.text.splitlines()) if stream else answer.json()["choices"][0]["message"]["content"]

        return await asyncio.to_thread(post)

    return ask


CLIENTS = {
    "openai": ask_openai,
    "openai with aiohttp": ask_openai_by_aiohttp,
    "blocking openai": ask_blocking_openai,
    "httpx": asker(httpx),
    "httpx2": asker(httpx2),
    "blocking httpx": blocking_asker(httpx),
    "blocking httpx2": blocking_asker(httpx2),
}


def texts(history: art.History) -> list[Any]:
    return [message["content"] for message in history.messages()]


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("whose", ["policy", "policy by the server's address", "nobody's"])
async def test_any_client_is_captured(served: ServedApp, name: str, whose: str) -> None:
    """The policy by the model's own address or the server's; `nobody's` is an endpoint that no model is known for."""
    served.app.bench.answers("hello", "world", "not recorded")
    url = served.policy.inference_base_url
    assert url is not None
    if whose == "nobody's":
        url = url.replace("127.0.0.1", "localhost")
    elif whose != "policy":
        url = f"{served.url}/v1"
    ask: Any = CLIENTS[name]

    async def rollout() -> None:
        assert await ask(url, [user("hi")], False) == "hello"
        said = {"role": "assistant", "content": "hello"}
        assert await ask(url, [user("hi"), said, user("so")], True) == "world"

    trajectory = await art.capture_auto_trajectory(rollout())
    await ask(url, [user("after the end")], False)
    assert texts(trajectory) == ["hi", "hello", "so", "world"]
    assert trajectory.additional_histories == []
    answers = [item for item in trajectory.messages_and_choices if is_choice(item)]
    assert len({answer.exchange_id for answer in answers}) == 2
    if whose != "nobody's":
        assert trajectory.metadata["rollout_id"]
        assert trajectory.final_policy_version == 3


async def test_all_dialects_of_a_trainable_model(served: ServedApp) -> None:
    served.app.bench.answers("hello")
    async with art.capture() as captured, openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY) as client:
        await client.responses.create(model=NAME, input="hi")
    assert texts(captured.trajectory) == ["hi", "hello"]
    assert captured.model is served.policy


async def test_each_request_belongs_to_its_own_capture(served: ServedApp) -> None:
    renderer = served.app.bench.renderer

    def echo(request: Any) -> list[int]:
        said = renderer.tokenizer.text(request.prompt_token_ids).split("user\n")[-1].split("<|im_end|>")[0]
        return [*renderer.tokenizer.encode(f"re {said}", add_special_tokens=False), renderer.stop_token_ids[0]]

    served.app.bench.engine.script = echo
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY) as client:

        async def ask(text: str) -> None:
            await client.chat.completions.create(model=NAME, messages=[user(text)])

        one, _, two = await asyncio.gather(
            art.capture_auto_trajectory(ask("hello"), model=served.policy),
            ask("outside"),
            art.capture_auto_trajectory(ask("world")),
        )
    assert (texts(one), texts(two)) == (["hello", "re hello"], ["world", "re world"])


async def test_one_capture_takes_the_clients_of_art_and_others(served: ServedApp) -> None:
    served.app.bench.answers("hello", "world")
    async with art.capture() as captured:
        assert await ask_openai(f"{served.url}/v1", [user("hi")], False) == "hello"
        messages: Any = [user("hi"), {"role": "assistant", "content": "hello"}, user("so")]
        await served.policy.openai_client().chat.completions.create(model=NAME, messages=messages)
    assert texts(captured.trajectory) == ["hi", "hello", "so", "world"]


async def test_a_known_model_is_preferred_to_an_endpoint_that_was_asked_before(served: ServedApp) -> None:
    """A rollout asks somebody else's model for the user's first words, and then its policy."""
    served.app.bench.answers("how are you", "hello")

    async def rollout() -> None:
        await ask_openai(f"{served.url}/v1".replace("127.0.0.1", "localhost"), [user("play a user")], False)
        await ask_openai(f"{served.url}/v1", [user("how are you")], False)

    trajectory = await art.capture_auto_trajectory(rollout())
    assert texts(trajectory) == ["how are you", "hello"]
    assert trajectory.additional_histories == []


async def test_a_send_that_somebody_wraps_meanwhile_records_once(
    served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.app.bench.answers("hello", "world", "again")
    url = f"{served.url}/v1".replace("127.0.0.1", "localhost")
    ask = CLIENTS["httpx"]
    with monkeypatch.context() as patch:
        async with art.capture():
            watched = httpx.AsyncClient.send
            await ask(url, [user("hi")], False)

            async def traced(client: Any, request: Any, **further: Any) -> Any:
                return await watched(client, request, **further)

            patch.setattr(httpx.AsyncClient, "send", traced)
        assert httpx.AsyncClient.send is traced, "what others have wrapped is theirs"
        await ask(url, [user("outside")], False)
        async with art.capture() as captured:
            await ask(url, [user("so")], False)
        assert texts(captured.trajectory) == ["so", "again"]
        assert captured.trajectory.additional_histories == []
    httpx.AsyncClient.send = SENDS[0]  # type: ignore[method-assign]


async def test_what_a_client_raises_goes_on(served: ServedApp) -> None:
    async with art.capture() as captured:
        with pytest.raises(httpx.ConnectError):
            await CLIENTS["httpx"]("http://127.0.0.1:9/v1", [user("hi")], False)
        with pytest.raises(openai.BadRequestError):
            async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY) as client:
                await client.chat.completions.create(model=NAME, messages=[user("hi")], temperature=-1)
        async with httpx.AsyncClient(headers=AUTH) as client:
            assert (await client.post(f"{served.url}/v1/responses", json={"model": [NAME]})).status_code == 400
            assert (await client.post(f"{served.url}/v1/responses", content=b"{")).status_code == 400
    assert captured.trajectory.messages_and_choices == []
    assert "chat/completions was answered with 400" in captured.trajectory.logs[-1]


def post_by_urllib(url: str) -> None:
    data = json.dumps(body([user("hi")], False)).encode()
    headers = AUTH | {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", data, headers)) as answer:
        assert answer.status == 200


def in_a_bare_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def test_an_empty_capture_is_said_with_its_reason(served: ServedApp, caplog: pytest.LogCaptureFixture) -> None:
    served.app.bench.answers(*["hello"] * 5)
    url = f"{served.url}/v1"
    elsewhere = url.replace("127.0.0.1", "localhost")

    async def silent() -> None: ...

    async def responses() -> None:
        async with openai.AsyncOpenAI(base_url=elsewhere, api_key=KEY) as client:
            await client.responses.create(model=NAME, input="hi")

    async def unknown(name: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as client:
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model=name, messages=[user("hi")])

    unseen = r"no request to a model was seen .* requests, aiohttp and urllib.* `captured\.base_url`"
    cases: list[tuple[Any, art.Model | None, str]] = [
        (silent(), None, unseen),
        (asyncio.to_thread(post_by_urllib, url), served.policy, unseen),
        (asyncio.to_thread(in_a_bare_thread, lambda: post_by_urllib(url)), None, unseen),
        (responses(), None, r"localhost:\d+/v1/responses was asked.* only chat completions"),
        (unknown("games/nobody"), None, r"\d/v1/chat/completions was answered with 404"),
        (unknown(f"{NAME}@99"), None, r"/rollouts/capture-\w+/v1/chat/completions was answered with 404"),
        (
            ask_openai(elsewhere, [user("hi")], False),
            served.policy,
            r"'games/agent' at http://localhost.*the capture is of 'agent' at http://127",
        ),
    ]
    for rollout, model, why in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "art"):
            trajectory = await art.capture_auto_trajectory(rollout, model=model)
        (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("art.capture")]
        assert said.startswith("the capture is empty: ")
        assert trajectory.logs[-1] == said
        assert re.search(why, said), said
    caplog.clear()
    with caplog.at_level(logging.WARNING, "art"):
        await art.capture_auto_trajectory(ask_openai(url, [user("hi")], False))
    assert not caplog.records
