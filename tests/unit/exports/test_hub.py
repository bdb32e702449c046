"""A push to a hub, by the process that does it, against as much of a hub as an upload needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as an upload needs."""

    seen: list[tuple[str, bytes]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.seen.append((self.path, body))
        own = f"http://{self.headers['host']}/me/agent"
        answer: dict[str, Any] = {"url": own, "name": "me/agent"}
        if "preupload" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            answer = {"files": files}
        elif "/commit/" in self.path:
            answer = {"success": True, "commitOid": "abc", "commitUrl": f"{own}/commit/abc"}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"id": "me/agent", "sha": "abc", "siblings": [], "tags": []})

    def _answer(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_push_to_a_hub_is_one_commit(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_TOKEN": "hf_secret"}
    env.pop("HF_HUB_OFFLINE", None)
    target = {"kind": "hub", "repo_id": "me/agent"}
    params = {"source": str(tmp_path), "target": target, "place": "", "message": "p/agent step 3"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "art.worker.file_child"],
            input=json.dumps({"call": "push", "params": params}) + "\n", capture_output=True, text=True, env=env,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["result"]["url"].endswith("/me/agent@abc")
    assert "hf_secret" not in done.stdout + done.stderr
    (commit,) = [body for path, body in Hub.seen if "/commit/" in path]
    assert b"adapter_config.json" in commit
    assert b"p/agent step 3" in commit
