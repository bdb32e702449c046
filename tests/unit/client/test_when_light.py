"""When the light path is left: hooks, tracers, mocks, foreign HTTP clients, missing names, the environment variable."""

from __future__ import annotations

import asyncio
import functools
import importlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import openai._base_client
import pytest
from openai.resources.chat import AsyncCompletions

import art
from art.capture import current
from art.client.http import Hooks
from art.client.openai_client import (
    STOCK_CLIENT,
    LightCompletions,
    make_blocking_openai_client,
    make_openai_client,
)
from art.client.rollout_context import RolloutContext, inside_rollout
from art.errors import ConfigError
from tests.support.light_client import PLAIN, Watch
from tests.support.scripted_chat import COMPLETION, ScriptedChat, answer, hang

SOON = {"retry_after_ms": "1"}


@pytest.fixture
async def server() -> AsyncIterator[ScriptedChat]:
    async with ScriptedChat().running() as running:
        yield running


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


async def ask(client: openai.AsyncOpenAI, times: int = 1, **further: Any) -> Any:
    for _ in range(times):
        completion = await client.chat.completions.create(**PLAIN | further)
    return completion


async def test_the_second_request_is_light(server: ScriptedChat, watch: Watch) -> None:
    async with make_openai_client(server.base_url, "key") as client:
        await ask(client)
        assert watch.light == 0
        await ask(client, 3)
        assert (watch.light, len(server.seen)) == (3, 4)


def traced(calls: list[str]) -> Callable[[Any], Any]:
    """A decorator such as those of tracers."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return await function(*args, **kwargs)

        return wrapper

    return decorate


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (AsyncCompletions, "create"),
        (openai._base_client.AsyncAPIClient, "request"),
        (openai._base_client.AsyncAPIClient, "post"),
        (httpx2.AsyncClient, "send"),
    ],
)
async def test_tracers_of_classes_see_requests(
    owner: type, name: str, server: ScriptedChat, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    if owner is httpx2.AsyncClient and openai.__version__.startswith("2."):
        owner = importlib.import_module("httpx").AsyncClient
    calls: list[str] = []
    async with make_openai_client(server.base_url, "key") as before:
        await ask(before)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, traced(calls)(getattr(owner, name)))
            async with make_openai_client(server.base_url, "key") as after:
                await ask(before, 2)
                await ask(after, 2)
                seen = 2 if name == "post" else 4  # parts of a client keep the `post` that they were made with
                assert (calls, watch.light) == ([name] * seen, 0)
        await ask(before, 2)
        assert (len(calls), watch.light) == (seen, 2)


@pytest.mark.parametrize(
    ("part", "name"),
    [("", "post"), ("_client", "send"), ("chat.completions", "_post"), ("_client._transport", "handle_async_request")],
)
async def test_tracers_of_objects_see_requests(part: str, name: str, server: ScriptedChat, watch: Watch) -> None:
    calls: list[str] = []
    async with make_openai_client(server.base_url, "key") as client:
        await ask(client)
        owner = functools.reduce(getattr, part.split("."), client) if part else client
        setattr(owner, name, traced(calls)(getattr(owner, name)))
        if not part:
            del client.__dict__["chat"]  # its parts keep the method that they were made with
        await ask(client, 3)
        assert (len(calls), watch.light) == (3, 0)


async def test_hooks_are_called_while_they_are_needed(server: ScriptedChat, watch: Watch) -> None:
    asked: list[Any] = []

    async def hook(request: Any) -> None:
        asked.append(request.url.path)

    needed = True
    async with make_openai_client(
        server.base_url, "key", Hooks({"request": [hook], "response": []}, lambda: needed)
    ) as c:
        await ask(c, 2)
        assert (len(asked), watch.light) == (2, 0)
        needed = False
        await ask(c, 2)
        assert (len(asked), watch.light) == (3, 1)
        c._client.event_hooks["request"].append(hook)  # one that the client was not made with
        await ask(c, 2)
        assert (len(asked), watch.light) == (7, 1)


async def test_a_capture_takes_the_stock_path(server: ScriptedChat, watch: Watch) -> None:
    model = art.Model(name="m", project="p", inference_base_url=server.base_url, inference_api_key="k")
    client = model.openai_client()
    await ask(client, 2)
    assert watch.light == 1
    async with art.capture(model) as captured:
        await ask(client)
        assert watch.light == 1
    assert [len(captured.trajectory.messages_and_choices), current.get()] == [2, None]
    await ask(client)
    assert watch.light == 2
    await model.close()


async def test_the_users_own_http_client_takes_the_stock_path(server: ScriptedChat, watch: Watch) -> None:
    async with make_openai_client(server.base_url, "key") as client:
        own = client.copy(http_client=openai.DefaultAsyncHttpxClient())
        await ask(own, 2)
        await own.close()
        assert watch.light == 0
        assert isinstance(own, type(client))


async def test_a_callable_key_is_asked_for_each_request(server: ScriptedChat, watch: Watch) -> None:
    keys = iter("abc")

    async def key() -> str:
        return next(keys)

    async with make_openai_client(server.base_url, "key") as client:
        await ask(client.with_options(api_key=key), 3)
    assert [seen.headers["Authorization"] for seen in server.seen] == ["Bearer a", "Bearer b", "Bearer c"]
    assert watch.light == 0


async def test_a_proxy_takes_the_stock_path(
    server: ScriptedChat, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.port}")
    async with make_openai_client("http://elsewhere.invalid/v1", "key") as client:
        await ask(client, 2)
    assert [seen.headers["Host"] for seen in server.seen] == ["elsewhere.invalid"] * 2
    assert watch.light == 0


async def test_retries_keep_the_seed_of_their_request(server: ScriptedChat, watch: Watch) -> None:
    troubles = [answer(503, {}, **SOON), answer(500, {}, **SOON)]
    async with make_openai_client(server.base_url, "key", model="p/m") as client:
        with inside_rollout(RolloutContext(model="p/m", seed=3)):
            await ask(client, 2)
            server.script = [*troubles]
            await ask(client, 2)  # light first
            server.script = [*troubles]
            await ask(client, timeout=5.0)  # stock only
        await ask(client)
    context = RolloutContext(model="p/m", seed=3)
    seeds = [str(context.next_seed()) for _ in range(5)]
    expected = [seeds[0], seeds[1], *[seeds[2]] * 3, seeds[3], *[seeds[4]] * 3, None]
    assert [seen.headers.get("x-art-seed") for seen in server.seen] == expected
    counts = [seen.headers["x-stainless-retry-count"] for seen in server.seen]
    assert counts == ["0", "0", "0", "1", "2", "0", "0", "1", "2", "0"]
    assert (watch.light, watch.handed_over) == (4, 1)


async def test_copies_and_blocking_clients_have_seeds_too(server: ScriptedChat) -> None:
    with inside_rollout(RolloutContext(model="p/m", seed=3)):
        async with make_openai_client(server.base_url, "key", model="p/m") as client:
            await ask(client.with_options(max_retries=1), extra_headers={"x-mine": "1"})
            await client.with_options(timeout=3.0).copy().models.list()
        with make_blocking_openai_client(server.base_url, "key", model="p/m") as blocking:
            await asyncio.to_thread(blocking.with_options(timeout=3.0).chat.completions.create, **PLAIN)
    context = RolloutContext(model="p/m", seed=3)
    expected = [str(context.next_seed()), None, str(context.next_seed())]
    assert [seen.headers.get("x-art-seed") for seen in server.seen] == expected
    assert [seen.headers["User-Agent"].split("/")[0] for seen in server.seen] == [
        "AsyncOpenAI",
        "AsyncOpenAI",
        "OpenAI",
    ]


async def test_the_variable_turns_it_off(server: ScriptedChat, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOCK_CLIENT, "1")
    async with make_openai_client(server.base_url, "key") as client:
        await ask(client, 2)
        assert watch.light == 0
        assert not isinstance(client.chat.completions, LightCompletions)
    monkeypatch.setenv(STOCK_CLIENT, "yes")
    with pytest.raises(ConfigError, match="ART_STOCK_CLIENT must be 1"):
        make_openai_client(server.base_url, "key")


async def test_an_sdk_that_sends_something_else_means_the_stock_path(
    server: ScriptedChat, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = openai._base_client.openapi_dumps
    monkeypatch.setattr(openai._base_client, "openapi_dumps", lambda body: dumps({**body, "new": 1}))
    async with make_openai_client(server.base_url, "key") as client:
        await ask(client, 3)
    assert watch.light == 0


async def test_a_server_that_comes_back(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    server = ScriptedChat()
    async with server.running():
        client = make_openai_client(server.base_url, "key")
        await ask(client, 2)
    answers = asyncio.gather(*(ask(client) for _ in range(20)))
    while watch.handed_over < 20:  # until each of them has failed
        await asyncio.sleep(0.005)
    async with server.running(port=server.port):
        assert [answer.id for answer in await answers] == [COMPLETION["id"]] * 20
        await ask(client)
        assert (watch.light, watch.handed_over) == (22, 20)
        await client.close()


async def test_a_cancelled_request_is_cancelled(server: ScriptedChat, watch: Watch) -> None:
    async with make_openai_client(server.base_url, "key") as client:
        await ask(client)
        server.script = [hang]
        asking = asyncio.create_task(ask(client))
        while len(server.seen) < 2:
            await asyncio.sleep(0.005)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await ask(client)
    assert (len(server.seen), watch.handed_over) == (3, 0)


def test_one_client_for_each_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    model = art.Model(name="m", project="p", inference_base_url="http://127.0.0.1:9/v1", inference_api_key="k")

    async def main() -> None:
        async with ScriptedChat().running() as server:
            model.inference_base_url = server.base_url
            await ask(model.openai_client(), 3)

    for loops in (1, 2):
        asyncio.run(main())
        assert watch.light == 2 * loops


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.2, which is not among the addresses for which settings of the environment are ignored."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=art", "-addext", "subjectAltName=IP:127.0.0.2"]
    subprocess.run([*command, *names], check=True, capture_output=True, cwd=tmp_path)
    return tmp_path / "cert.pem"


async def test_https(certificate: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, certificate.with_name("key.pem"))
    async with ScriptedChat().running(host="127.0.0.2", tls=tls) as server:
        async with make_openai_client(server.base_url, "key") as client:
            with pytest.raises(openai.APIConnectionError) as caught:
                await ask(client.with_options(max_retries=0), 1)
            assert "certificate" in str(caught.value.__cause__)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with make_openai_client(server.base_url, "key") as client:
            await ask(client, 3)
    assert watch.light == 2
