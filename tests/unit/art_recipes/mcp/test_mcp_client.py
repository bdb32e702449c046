"""The client, with the official SDK on both sides: the servers of examples/, and servers that fail."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from art.errors import ConfigError, ToolServerError
from art_recipes.mcp import MCPClient, MCPTool

FAULTY = """
import json, os, sys, threading, time

def slow(seconds):
    time.sleep(seconds)
    return "done"

def die():
    print("out of coffee", file=sys.stderr, flush=True)
    os._exit(3)

def environment(name):
    return os.environ.get(name, "unset")

def pid():
    return str(os.getpid())

def answer(asked):
    known = {
        "initialize": {
            "protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "a", "version": "1"}
        },
        "tools/list": {
            "tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("slow", "die", "environment", "pid")]
        },
    }
    method, given = asked["method"], asked.get("params", {})
    if method == "tools/call":
        said = {"content": [{"type": "text", "text": globals()[given["name"]](**given["arguments"])}]}
    else:
        said = known.get(method)
    outcome = {"error": {"code": -32601, "message": "unknown"}} if said is None else {"result": said}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **outcome}) + "\\n")
    sys.stdout.flush()

for line in sys.stdin:
    if "id" in (asked := json.loads(line)):
        threading.Thread(target=answer, args=(asked,), daemon=True).start()
"""
"""A server of the standard library alone, which starts at once."""


@pytest.fixture
def faulty() -> list[str]:
    return [sys.executable, "-S", "-c", FAULTY]


async def test_inventory_over_stdio(inventory: list[str]) -> None:
    async with MCPClient(inventory) as client:
        tools = {tool.name: tool for tool in await client.list_tools()}
        (resource,) = await client.list_resources()
        assert resource.uri == "inventory://categories"
        assert resource.mime_type == "text/plain"
        schema = tools["change_stock"].to_tool_schema()["function"]
        assert schema["parameters"]["required"] == ["sku", "change", "reason"]
        assert "below 0" in schema["description"]

        bought = await client.call_tool("change_stock", {"sku": "P-100", "change": 3, "reason": "delivery"})
        assert json.loads(bought.text)["stock"] == 7
        too_many = await client.call_tool("change_stock", {"sku": "P-100", "change": -8, "reason": "sale"})
        assert too_many.is_error
        assert "has a stock of 7" in too_many.text
        moved = await client.call_tool("list_movements", {"sku": "P-100"})
        assert json.loads(moved.text) == {"change": 3, "reason": "delivery"}
        for name, arguments in (("nothing", {}), ("get_product", {}), ("get_product", {"sku": "P-9"})):
            assert (await client.call_tool(name, arguments)).is_error


async def test_calendar_over_stdio(calendar: list[str]) -> None:
    async with MCPClient(calendar) as client:
        free = await client.call_tool("find_free_times", {"day": "2030-01-07", "minutes": 60, "people": ["ann", "bob"]})
        assert free.text.splitlines()[:2] == ["2030-01-07 10:00", "2030-01-07 12:30"]
        assert free.text.splitlines()[-1] == "2030-01-07 16:00"
        new = {"title": "lunch", "start": "2030-01-07 12:30", "minutes": 60, "people": ["ann"]}
        assert json.loads((await client.call_tool("create_event", new)).text)["id"] == 7
        busy = await client.call_tool("move_event", {"id": 2, "start": "2030-01-07 12:00"})
        assert busy.is_error
        assert "lunch (event 7)" in busy.text
        assert (await client.call_tool("cancel_event", {"id": 7})).text == "cancelled: lunch"
        assert not (await client.call_tool("move_event", {"id": 2, "start": "2030-01-07 12:00"})).is_error
        endless = await client.call_tool("find_free_times", {"day": "2030-01-07", "minutes": -600, "people": ["ann"]})
        assert endless.is_error


async def test_a_slow_tool_is_an_answer_and_others_go_on(faulty: list[str]) -> None:
    async with MCPClient(faulty, call_timeout_s=2.0) as client:
        late, *rest = await asyncio.gather(
            client.call_tool("slow", {"seconds": 36_000}),
            *(client.call_tool("slow", {"seconds": 0.1}) for _ in range(5)),
        )
        assert late.is_error
        assert late.text == "slow gave no answer within 2 s"
        assert [result.text for result in rest] == ["done"] * 5


async def test_a_dead_server_is_no_answer(faulty: list[str]) -> None:
    async with MCPClient(faulty) as client:
        with pytest.raises(ToolServerError, match=r"(?s)failed.*out of coffee"):
            await client.call_tool("die", {})
        with pytest.raises(ToolServerError):
            await client.call_tool("pid", {})


async def test_a_server_that_stands_still_is_no_answer(faulty: list[str]) -> None:
    async with MCPClient(faulty, connect_timeout_s=60, call_timeout_s=60) as client:
        pid = int((await client.call_tool("pid", {})).text)
        client._connect_timeout_s = client._call_timeout_s = 0.3
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(ToolServerError, match="gave no list"):
                await client.call_tool("pid", {})
        finally:
            os.kill(pid, signal.SIGCONT)
    with pytest.raises(ProcessLookupError):  # and nothing is left of it
        os.kill(pid, 0)


async def test_a_command_gets_no_keys_but_those_given(faulty: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with MCPClient(faulty, env={"SHOP_KEY": "k"}) as client:
        assert (await client.call_tool("environment", {"name": "OPENAI_API_KEY"})).text == "unset"
        assert (await client.call_tool("environment", {"name": "SHOP_KEY"})).text == "k"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/no/such/program"], "No such file"),
        ([sys.executable, "-S", "-c", "import sys; sys.exit('I cannot')"], "(?s)end of its log:.*I cannot"),
        ("http://127.0.0.1:9/mcp", "ConnectError"),
    ],
)
async def test_what_cannot_be_connected(command: Any, message: str) -> None:
    with pytest.raises(ToolServerError, match=message):
        async with MCPClient(command):
            pass


async def test_a_server_that_says_nothing() -> None:
    with pytest.raises(ToolServerError, match=r"no connection within 0.3 s"):
        async with MCPClient([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], connect_timeout_s=0.3):
            pass


# -- HTTP --


async def test_inventory_over_http(inventory_url: str) -> None:
    async with MCPClient(inventory_url) as one, MCPClient(inventory_url) as other:
        assert len(await one.list_tools()) == 7
        with pytest.raises(ConfigError, match="connected already"):
            await one.__aenter__()
        await one.call_tool("set_price", {"sku": "P-200", "price": 30})
        assert json.loads((await other.call_tool("get_product", {"sku": "P-200"})).text)["price"] == 30
        assert (await other.call_tool("get_product", {"sku": "?"})).is_error


async def test_a_limit_of_requests_is_not_the_tools_error(limited_url: str) -> None:
    async with MCPClient(limited_url, headers={"Authorization": "Bearer right"}) as client:
        assert [tool.name for tool in await client.list_tools()] == ["look"]
        assert await client.list_resources() == []
        with pytest.raises(ToolServerError, match="refused a request with HTTP status 429"):
            await client.call_tool("look", {})


async def test_a_wrong_key_is_told(limited_url: str) -> None:
    with pytest.raises(ToolServerError, match=r"401.*`headers`"):
        async with MCPClient(limited_url, headers={"Authorization": "Bearer wrong"}):
            pass


# -- misuse --


async def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'agent-reinforcement-trainer\[mcp\]'"):
        async with MCPClient("http://127.0.0.1:9/mcp"):
            pass


@pytest.mark.parametrize(
    ("server", "options"),
    [
        ("", {}),
        ([], {}),
        ("a", {"headers": {"a": "b"}}),
        ("http://a", {"env": {"a": "b"}}),
        ("a", {"call_timeout_s": 0}),
    ],
)
def test_wrong_settings(server: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MCPClient(server, **options)


@pytest.mark.parametrize("value", ["Bearer s3cret\nmore", "Bearer s3crét", " Bearer s3cret"])
def test_a_header_that_cannot_be_sent_is_refused_unseen(value: str) -> None:
    with pytest.raises(ConfigError, match="header 'Authorization'") as caught:
        MCPClient("http://a/mcp", headers={"Authorization": value})
    assert "s3cr" not in caught.value.message


async def test_an_unconnected_client_says_so() -> None:
    with pytest.raises(ToolServerError, match="async with"):
        await MCPClient("a").list_tools()


def test_the_sdk_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, art_recipes.mcp; sys.exit('mcp' in sys.modules or 'litellm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tool_as_a_dict() -> None:
    tool = MCPTool("a", "does a", {"type": "object"})
    assert MCPTool.from_dict(tool.to_dict()) == tool
    with pytest.raises(ValueError, match="has the fields"):
        MCPTool.from_dict({"title": "a"})
