"""A stand-in for W&B's server: enough of its API for wandb to log in, open, continue and upload a run."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

API_KEY = "a" * 40


class FakeWandb:
    """Histories of runs by id: rows by line number, as W&B keeps them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.overwritten: list[int] = []
        """Lines that came a second time."""
        self.histories: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)

    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": API_KEY, "WANDB_SILENT": "true"}

    def points(self, metric: str) -> list[tuple[int, float]]:
        (history,) = self.histories.values()
        rows = [history[line] for line in sorted(history)]
        return [(row["training_step"], row[metric]) for row in rows if metric in row]

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answer a GraphQL request; an unknown one gets nothing."""
        name = str(variables.get("name") or variables.get("id"))
        if "RunResumeStatus" in query:
            return {"model": {**_PROJECT, "bucket": self._bucket(name) if name in self.histories else None}}
        if "mutation UpsertBucket" in query:
            is_new = name not in self.histories
            return {"upsertBucket": {"bucket": self._bucket(name), "inserted": is_new}}
        if "mutation CreateRunFiles" in query:
            files = [{"name": file, "uploadUrl": f"{self.url}/upload"} for file in variables.get("files", [])]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        viewer = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": {"features": []}}

    def _bucket(self, name: str) -> dict[str, Any]:
        history = self.histories[name]
        tail = [json.dumps(history[line]) for line in sorted(history)[-1:]]
        return {
            "id": name, "name": name, "displayName": name, "description": None, "config": "{}", "summaryMetrics": "{}",
            "sweepName": None, "historyLineCount": len(history), "logLineCount": 0, "eventsLineCount": 0,
            "historyTail": json.dumps(tail), "eventsTail": "[]", "tags": [], "wandbConfig": '{"t": 1}',
            "project": _PROJECT, "files": {"edges": []},
        }  # fmt: skip

    def take(self, run_id: str, files: dict[str, Any]) -> None:
        """Keep the lines of a file stream."""
        chunk = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        for line, text in enumerate(chunk["content"], chunk["offset"]):
            self.overwritten += [line] if line in self.histories[run_id] else []
            self.histories[run_id][line] = json.loads(text)


_PROJECT = {"id": "p", "name": "games", "entity": {"id": "e", "name": "me"}}


@contextmanager
def fake_wandb() -> Iterator[FakeWandb]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # of a program that was killed
                super().handle()

        def log_message(self, *_: Any) -> None:
            pass

        def _body(self) -> dict[str, Any]:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            try:
                body = json.loads(data)
            except ValueError:
                return {}
            return body if isinstance(body, dict) else {}

        def do_POST(self) -> None:
            body, reply = self._body(), dict[str, Any]()
            if self.path.startswith("/graphql"):
                reply = {"data": fake.answer(body.get("query", ""), body.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                fake.take(self.path.split("/")[-2], body.get("files") or {})
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_PUT = do_GET = do_POST

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake = FakeWandb(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
