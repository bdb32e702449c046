"""An OpenAI-compatible server on a port of this machine that answers with the results of a function."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Generic, Self, TypeVar

logger = logging.getLogger(__name__)

FaultT = TypeVar("FaultT", bound=str)
Reply = tuple[int, dict[str, Any]]
"""HTTP status and body of an answer."""


class ScriptedServer:
    """An OpenAI-compatible server inside a `with` statement. It calls `reply`, from several threads at once."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply], port: int = 0) -> None:
        """
        Args:
            reply: returns the answer to the body of a request.
            port: port of the server; 0 takes a free one.
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
            disable_nagle_algorithm = True  # or each answer after the first of a connection waits 40 ms

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    status, answer = reply(body)
                except Exception as error:  # an error of the script, which a second attempt would not cure
                    logger.exception("the script failed to answer a request")
                    status, answer = failure(400, f"the script failed: {type(error).__name__}: {error}")
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing, since the caller sees every answer."""

        self._server = _QuietServer(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()


@dataclass(slots=True, kw_only=True)
class ScriptedRole(ScriptedServer, Generic[FaultT]):
    """Base of the scripted judge and generator: servers that fail on demand."""

    faults: Sequence[FaultT] = ()
    """The faults of the first requests, in order."""
    always: FaultT | None = None
    """The fault of all requests after the first ones, unless they get a random one."""
    fault_rate: float = 0.0
    """Share of the requests after the first ones that have one of `random_faults`."""
    seed: int = 0
    """Seed of everything random."""
    delay_s: float = 2.0
    """Delay of the fault `slow`, in seconds."""
    port: int = 0
    """Port of the server; 0 takes a free one."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all requests, in order."""
    known_faults: ClassVar[tuple[str, ...]]
    random_faults: ClassVar[tuple[Any, ...]]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        if unknown := {*self.faults, *([self.always] if self.always else [])} - set(self.known_faults):
            raise ValueError(f"unknown faults {sorted(unknown)}; known faults are {', '.join(self.known_faults)}")
        self._rng.seed(self.seed)
        ScriptedServer.__init__(self, self.answer, self.port)

    def answer(self, body: dict[str, Any]) -> Reply:
        """Return HTTP status and body of the answer to a request with `body`."""
        with self._lock:
            index = len(self.requests)
            self.requests.append(body)
            if index < len(self.faults):
                fault: FaultT | None = self.faults[index]
            else:
                fails = self._rng.random() < self.fault_rate
                fault = self._rng.choice(self.random_faults) if fails else self.always
            rng = random.Random(self._rng.random())
        if fault == "slow":
            time.sleep(self.delay_s)
        if fault in ("429", "500", "401"):
            return failure(int(fault), f"scripted fault {fault}")
        if fault == "no_schema" and "response_format" in body:
            return failure(400, "response_format of type json_schema is not supported")
        return self.reply(body, fault, rng)

    def reply(self, body: dict[str, Any], fault: FaultT | None, rng: random.Random) -> Reply:
        """Answer a request that reaches the role, with `fault` in the content."""
        raise NotImplementedError


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    """Connections that may wait to be accepted. With the default of 5, many at once are reset on a busy machine."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up, as they do after a time-out."""


def completion(body: dict[str, Any], message: dict[str, Any]) -> Reply:
    """Make a chat completion with the assistant's `message`. A token is counted for every four characters."""
    prompt_tokens = sum(len(prior.get("content") or "") for prior in body["messages"]) // 4
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(message.get("content") or "") // 4}
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return 200, {
        "id": f"scripted-{time.monotonic_ns()}", "object": "chat.completion", "created": int(time.time()),
        "model": body["model"], "usage": usage | {"total_tokens": sum(usage.values())},
        "choices": [{"index": 0, "finish_reason": reason, "message": {"role": "assistant"} | message}],
    }  # fmt: skip


def failure(status: int, message: str, code: str | None = None) -> Reply:
    return status, {"error": {"message": message, "type": "scripted", "code": code, "param": None}}
