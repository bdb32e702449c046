"""A model that answers by a script, over HTTP; and the servers of examples/."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import art
from tests.support.ports import free_port

EXAMPLES = Path(__file__).parents[4] / "examples" / "mcp_servers"
INVENTORY = [sys.executable, str(EXAMPLES / "inventory" / "server.py")]
CALENDAR = [sys.executable, str(EXAMPLES / "calendar" / "server.py")]


class ScriptedModel:
    """Gives the answers of a script in their order: a text, calls `[(tool, arguments)]`, a whole choice, or a status."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or each later answer of a connection waits 40 ms

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = scripted.answer(body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def model(self) -> art.Model[Any, Any]:
        return art.Model(name="m", project="p", inference_base_url=self.base_url, inference_api_key="none")

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        given = self.script[len(self.requests)]
        self.requests.append(body)
        if callable(given):
            given = given(body)
        if isinstance(given, tuple):
            return given
        if isinstance(given, str):
            given = {"message": {"role": "assistant", "content": given}}
        elif isinstance(given, list):
            calls = [
                {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(given)
            ]
            given = {"message": {"role": "assistant", "content": None, "tool_calls": calls}}
        choice = {"index": 0, "finish_reason": "stop"} | given
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return 200, {
            "id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage
        }  # fmt: skip


@pytest.fixture
def scripted() -> Iterator[Callable[[Sequence[Any]], ScriptedModel]]:
    model = ScriptedModel()

    def start(script: Sequence[Any]) -> ScriptedModel:
        model.script = list(script)
        return model

    yield start
    model.server.shutdown()
    model.server.server_close()


class Limited(BaseHTTPRequestHandler):
    """An older server, without sessions and streams, that wants a key and refuses every call."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    RESULTS = {
        "initialize": {
            "protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "a", "version": "1"}
        },
        "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
    }  # fmt: skip

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        result = self.RESULTS.get(body["method"])
        data = b"" if result is None else json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": result}).encode()
        known = {"server/discover": 404, "notifications/initialized": 202, "tools/call": 429}
        status = known.get(body["method"], 200) if self.headers["Authorization"] == "Bearer right" else 401
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send_error(405)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def limited_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Limited)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
    server.shutdown()
    server.server_close()


@pytest.fixture
def inventory() -> list[str]:
    return INVENTORY


@pytest.fixture
def calendar() -> list[str]:
    return CALENDAR


@pytest.fixture(scope="session")
def inventory_url() -> Iterator[str]:
    """The inventory over HTTP. Those that name their rollout find it unchanged."""
    port = free_port()
    with subprocess.Popen([*INVENTORY, "--http", "--port", str(port)], stderr=subprocess.DEVNULL) as process:
        for _ in range(2400):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()
