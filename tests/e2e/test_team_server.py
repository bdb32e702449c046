"""A real `art-server` as a team has one: loaded at the start, keys of projects, no key in any file, an orderly end."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import art
from art.storage.keys import KeyStore
from tests.support.ports import free_port

SERVER_KEY = "server-" + secrets.token_hex(16)
PROMPT = {"role": "user", "content": "say yes, no or maybe"}


class Server:
    def __init__(self, path: Path, base_model: Path) -> None:
        self.data_dir = path / "data"
        self.output = path / "output.txt"
        port = free_port()
        config = json.dumps({"require_gain": 0.0})
        command = [sys.executable, "-m", "art.cli.server", "--data-dir", str(self.data_dir), "--port", str(port)]
        command += ["--model", str(base_model)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--log-level", "debug", "--config-json", config],
                stdout=output, stderr=output, env=os.environ | {"ART_API_KEY": SERVER_KEY},
            )  # fmt: skip
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                self.http.get("/health")
                return
            except httpx2.TransportError:
                time.sleep(0.05)
        pytest.fail(self.output.read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), tiny_model)
    yield server
    server.process.kill()
    server.process.wait()


def test_it_loads_its_model_and_serves_a_key_of_a_project(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    operator = {"authorization": f"Bearer {SERVER_KEY}"}
    deadline = time.monotonic() + 150
    while (answer := server.http.get("/ready", headers=operator)).status_code == 503:
        assert set(answer.json()["obstacles"].values()) == {"starting"}
        assert time.monotonic() < deadline, server.output.read_text()
        time.sleep(0.1)
    assert answer.json() == {"ready": True, "obstacles": {}}
    store = KeyStore(server.data_dir / "keys.db")
    _, text = store.create("agent", project="games", scopes=["infer", "train"])
    store.close()
    key = {"authorization": f"Bearer {text}"}
    register = {"project": "games", "name": "agent", "base_model": str(tiny_model)}
    elsewhere = server.http.post("/api/models", json=register | {"base_model": str(tmp_path)}, headers=key)
    assert elsewhere.status_code == 403
    done = server.http.post("/api/models", json=register, headers=key, timeout=200)
    assert done.status_code == 200, done.text
    chat = {"model": "agent", "messages": [{"role": "user", "content": "Well?"}], "max_completion_tokens": 4}
    usage = server.http.post("/v1/chat/completions", json=chat, headers=key).json()["usage"]
    assert len(server.http.get("/health", headers=operator).json()["base_models"]) == 1  # it shares what was loaded
    metrics = server.http.get("/metrics", headers=operator).text
    for line in (
        f'art_tokens_total{{kind="completion",model="games/agent"}} {usage["completion_tokens"]:.1f}',
        f'art_process_up{{process="engine of {tiny_model.name}"}} 1.0',
        f'art_engine_running{{engine="{tiny_model.name}"}} 0.0',
        'art_jobs{state="queued"} 0.0',
    ):
        assert line in metrics.splitlines()


def test_a_gate_that_the_configuration_requires(server: Server) -> None:
    store = KeyStore(server.data_dir / "keys.db")
    _, text = store.create("promoter", project="games", scopes=["infer", "train"])
    store.close()
    address, body = "/api/models/games/agent/promotions", {"step": 0}
    operator, key = ({"authorization": f"Bearer {text}"} for text in (SERVER_KEY, text))
    for changes, status, says in (
        ({}, 409, "This server requires +0 of every promotion"),
        ({"gate": {"require": -1}}, 400, "less than 0"),
        ({"force": True}, 403, "scope `admin`"),
    ):
        answer = server.http.post(address, json=body | changes, headers=key)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text
    assert server.http.post(address, json=body | {"force": True}, headers=operator).status_code == 200
    decisions = [one["decision"] for one in server.http.get(address, headers=key).json()["promotions"]]
    assert decisions == ["refused", "forced"]


async def test_it_trains_for_a_client_in_another_directory(
    server: Server, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    async with art.Backend(str(server.http.base_url), SERVER_KEY) as backend:
        model = art.TrainableModel(
            name="agent", project="hand", base_model=f"./{tiny_model.name}", base_path=str(tmp_path / "log")
        )
        await model.register(backend)

        async def rollout(i: int) -> art.Trajectory:
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=[PROMPT], seed=i, max_completion_tokens=8
            )
            return art.Trajectory(messages_and_choices=[PROMPT, completion.choices[0]], reward=i % 2)

        groups = await art.gather_trajectory_groups([art.TrajectoryGroup(rollout(i) for i in range(4))], pbar_desc=None)
        result = await model.train(groups)
        assert result.step == 1
        # The same model by its whole path is the same model.
        same = art.TrainableModel(name="agent", project="hand", base_model=str(tiny_model))
        await same.register(backend)
        assert await same.get_step() == 1
    assert (tmp_path / "log" / "hand" / "models" / "agent" / "history.jsonl").exists()


def test_no_key_in_logs_files_or_answers(server: Server) -> None:
    store = KeyStore(server.data_dir / "keys.db")
    key, text = store.create("ci", project="games", scopes=["infer", "train"])
    wrong = "art_" + key.id + "_" + secrets.token_urlsafe(32)
    answers: list[str] = []
    for given in (SERVER_KEY, text, wrong):
        headers = {"authorization": f"Bearer {given}"}
        for method, path in [
            ("GET", "/v1/models"), ("GET", "/api/models/games/none"), ("POST", "/v1/chat/completions"),
            ("POST", "/api/models"), ("GET", f"/nothing/{given}"), ("GET", "/openapi.json"), ("GET", "/ready"),
        ]:  # fmt: skip
            answers.append(server.http.request(method, path, headers=headers, content=b"{").text)
        for headers in ({"authorization": given}, {"authorization": f"Basic {given}"}, {"x-api-key": given + "x"}):
            answers.append(server.http.get("/v1/models", headers=headers).text)
        answers.append(server.http.get("/metrics", headers={"authorization": f"Bearer {SERVER_KEY}"}).text)
    store.close()
    files = [path for path in server.data_dir.rglob("*") if path.is_file()]
    assert {"art.db", "keys.db"} <= {path.name for path in files}
    written = b"\n".join([server.output.read_bytes(), *(path.read_bytes() for path in files)])
    assert b"art-server listens on" in written
    for secret in (SERVER_KEY, text.split("_", 2)[2], wrong.split("_", 2)[2]):
        assert secret.encode() not in written
        assert not any(secret in answer for answer in answers if "there is no route" not in answer)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_open_files_are_raised_to_what_the_system_allows(server: Server) -> None:
    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    soft, hard = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
    assert int(soft) == min(int(hard), 65_536)


def test_an_orderly_end(server: Server) -> None:
    """Last: it ends the server."""
    assert server.http.get("/ready").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
