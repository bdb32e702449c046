"""A real `art-server` is given secrets of twenty kinds in every place, and no file of its data directory and no log has
one of them afterwards."""

from __future__ import annotations

import base64
import json
import os
import secrets
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from art.cli import server as art_server
from art.storage.keys import KeyStore
from tests.support.ports import free_port


def fresh(prefix: str = "") -> str:
    return prefix + secrets.token_hex(16)


SERVER_KEY = fresh("server-")
ENVIRONMENT = {
    "HF_TOKEN": fresh("hf_"), "OPENAI_API_KEY": fresh("sk-proj-"), "ANTHROPIC_API_KEY": fresh("sk-ant-"),
    "WANDB_API_KEY": fresh(), "AWS_ACCESS_KEY_ID": "AKIA" + secrets.token_hex(8).upper(),
    "AWS_SECRET_ACCESS_KEY": fresh(), "AWS_SESSION_TOKEN": fresh(), "VLLM_API_KEY": fresh(), "DB_PASSWORD": fresh(),
}  # fmt: skip
HEADERS = {
    "authorization": f"Bearer {fresh('art_0123456789ab_')}", "x-api-key": fresh(), "proxy-authorization": f"Basic {fresh()}",
    "cookie": f"session={fresh()}", "x-goog-api-key": fresh("AIza"), "x-auth-token": fresh(),
}  # fmt: skip
QUERY = {"api_key": fresh(), "access_token": fresh(), "X-Amz-Signature": fresh()}
USERINFO = fresh()
IN_BODIES = {
    "api_key": fresh(),
    "password": fresh(),
    "token": fresh("ghp_"),
    "jwt": f"eyJ{fresh()}.{fresh()}.{fresh()}",
}
IN_SETTINGS = fresh("sk-")


def all_secrets() -> dict[str, str]:
    """Each secret by where it was given; headers without their scheme."""
    given = {f"${name}": value for name, value in ENVIRONMENT.items()} | {"ART_API_KEY": SERVER_KEY}
    given |= {f"header {name}": value.rpartition(" ")[2].rpartition("=")[2] for name, value in HEADERS.items()}
    given |= {f"query {name}": value for name, value in QUERY.items()}
    given |= {f"body {name}": value for name, value in IN_BODIES.items()}
    return given | {"userinfo": USERINFO, "settings": IN_SETTINGS}


class Server:
    def __init__(self, path: Path) -> None:
        self.data_dir, self.output = path / "data", path / "output.txt"
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        environment = os.environ | ENVIRONMENT | {"ART_API_KEY": SERVER_KEY, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "art.cli.server", "--data-dir", str(self.data_dir), "--port", str(port)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--log-level", "debug"], stdout=output, stderr=output, env=environment
            )
        self.http = httpx2.Client(base_url=self.address, timeout=120, verify=False)
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                self.http.get("/health")
                return
            except httpx2.TransportError:
                time.sleep(0.05)
        pytest.fail(self.output.read_text())

    def ask(self, method: str, path: str, key: str = SERVER_KEY, **request: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"} | request.pop("headers", {})
        return self.http.request(method, path, headers=headers, **request)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.process.kill()
    server.process.wait()


def refuse_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Ask for a server with settings that have secrets in wrong places. Returns what it prints."""
    engine = {"settings": {"engine": {"kind": "vllm", "urls": [f"http://u:{USERINFO}@gpu1:8000"]}}}
    files = [{"api_key": IN_SETTINGS, "port": IN_SETTINGS}, engine]
    options = [["--config-json", json.dumps(engine)]]
    for number, settings in enumerate(files):
        (tmp_path / f"{number}.yaml").write_text(json.dumps(settings))
        options.append(["--config", str(tmp_path / f"{number}.yaml")])
    capsys.readouterr()
    monkeypatch.setenv("ART_API_KEY", SERVER_KEY)
    for option in options:
        assert art_server.main(["--data-dir", str(tmp_path / "none"), *option]) != 0
    captured = capsys.readouterr()
    printed = (captured.out + captured.err).encode()
    assert b"a user or a password" in printed
    return printed


def use(server: Server, tiny_model: Path) -> str:
    """Use a server well and badly, with secrets in every place. Returns a key that was made for it."""
    store = KeyStore(server.data_dir / "keys.db")
    _, key = store.create("agent", project="games", scopes=["infer", "train"])
    store.close()
    for name, value in HEADERS.items():
        server.http.get("/v1/models", headers={name: value})
        server.ask("POST", "/v1/chat/completions", headers={name: value}, content=b"{")
    for name, value in (QUERY | IN_BODIES).items():
        server.ask("GET", f"/v1/models?{name}={value}")
        server.ask("GET", f"/nothing/{value}")
        server.ask("POST", "/v1/chat/completions", json={"model": "games/agent", "messages": [], name: value})
        server.ask(
            "POST", "/api/models", json={"project": "games", "name": "agent", "base_model": f"o/n?{name}={value}"}
        )
    model = {"project": "games", "name": "agent", "base_model": str(tiny_model)}
    server.ask("POST", "/api/models", json=model | {"base_model": f"https://u:{USERINFO}@hub/owner/name"})
    vllm = {"settings": {"engine": {"kind": "vllm", "urls": [f"http://u:{USERINFO}@gpu1:8000"]}}}
    assert server.ask("POST", "/api/models", json=model | vllm).status_code == 400
    registered = server.ask("POST", "/api/models", json=model)
    assert registered.status_code == 200, registered.text
    chat = {"model": "agent", "messages": [{"role": "user", "content": "Well?"}], "max_completion_tokens": 4}
    assert server.ask("POST", "/v1/chat/completions", key, json=chat).status_code == 200
    targets = [
        {"kind": "s3", "bucket": "b", "endpoint_url": f"http://u:{USERINFO}@127.0.0.1:9"},
        {"kind": "s3", "bucket": "b", "endpoint_url": "http://127.0.0.1:9"},
        {"kind": "hub", "repo_id": "owner/name"},
    ]
    for number, target in enumerate(targets):
        job = {"job_id": f"job-0000000{number}", "target": target}
        server.ask("POST", "/api/models/games/agent/push", json=job)
    for number in (1, 2):  # neither place can be reached, which the log of file jobs tells
        server.ask("GET", f"/api/jobs/job-0000000{number}?wait_s=20")
    return key


def everything_written(server: Server) -> bytes:
    """The content of every file, with the payloads of jobs uncompressed."""
    files = [path for path in server.data_dir.rglob("*") if path.is_file()]
    assert {"art.db", "keys.db"} <= {path.name for path in files}
    assert sum(path.suffix == ".log" for path in files) >= 3, "engine, trainer, file jobs"
    with sqlite3.connect(server.data_dir / "art.db") as db:
        payloads = [zlib.decompress(row[0]) for row in db.execute("SELECT payload FROM jobs WHERE payload IS NOT NULL")]
    return b"\n".join([server.output.read_bytes(), *payloads, *(path.read_bytes() for path in files)])


def test_no_secret_of_twenty_kinds_is_in_a_file_or_log(
    server: Server, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given = all_secrets() | {"a key of a project": ""}
    printed = refuse_settings(tmp_path, capsys, monkeypatch)
    given["a key of a project"] = use(server, tiny_model).split("_", 2)[2]
    assert len(given) >= 20
    written = printed + everything_written(server)
    assert b"art-server listens on" in written
    for place, secret in given.items():
        forms = (secret, base64.b64encode(secret.encode()).decode())
        assert not any(form.encode() in written for form in forms), place
    assert b"\x1b" not in server.output.read_bytes()
