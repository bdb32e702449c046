"""An OpenAI-compatible server on a free port of this machine, whose answers a program makes up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Reply = tuple[int, dict[str, Any]]
"""Status and body."""


class ScriptedServer:
    """As a context manager. Threads answer the requests, so `reply` is called by several at once."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply], port: int = 0) -> None:
        """
        Args:
            reply: the answer to the body of a request.
            port: 0 takes a free one.
        """
        self._reply, self._port = reply, port
        self._server: ThreadingHTTPServer | None = None

    @property
    def base_url(self) -> str:
        assert self._server is not None, "use it in a `with` statement"
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        reply = self._reply

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = reply(body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the caller sees every answer."""

        self._server = _QuietServer(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has hung up is no error here: that is how time-outs look."""


def completion(body: dict[str, Any], message: dict[str, Any]) -> Reply:
    """The answer in which the assistant says `message`. Tokens are counted as four characters each."""
    prompt_tokens = sum(len(said["content"]) for said in body["messages"]) // 4
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(message.get("content") or "") // 4}
    return 200, {
        "id": f"scripted-{time.monotonic_ns()}", "object": "chat.completion", "created": int(time.time()),
        "model": body["model"], "usage": usage | {"total_tokens": sum(usage.values())},
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant"} | message}],
    }  # fmt: skip


def failure(status: int, message: str, code: str | None = None) -> Reply:
    return status, {"error": {"message": message, "type": "scripted", "code": code, "param": None}}
