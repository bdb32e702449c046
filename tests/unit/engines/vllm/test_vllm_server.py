"""The start of a vLLM server, its death and its command line. Short programs replace vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from art.config import EngineConfig, ModelSettings, ServerConfig, TrainerConfig, VllmConfig
from art.engine import EngineInfo
from art.engines.vllm.command import Installation, find_installation, server_command, server_environment
from art.engines.vllm.start import GUARD, VllmServer
from art.errors import ConfigError, ProcessError
from art.runtime.placement import AssignedDevices, Devices, Gpu, check_placement, choose_placement

CPU = Installation(python=sys.executable, vllm="0.32.0", torch="2.13.0+cpu", device="cpu")
INFO = EngineInfo(vocab_size=64, max_context=128, dtype="float32", device="cpu")
SERVER = """
import http.server, json, os, subprocess, sys
import socketserver
option, address = sys.argv[-1].split("=")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"")
    def do_POST(self):
        assert self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
        choice = {"prompt_logprobs": [None, {"0": {"logprob": -1.0}}]}
        self.answer(json.dumps({"choices": [choice]}).encode())
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {below.pid}")
open(sys.argv[1] + ".mode", "w").write(os.environ.get("VLLM_SERVER_DEV_MODE", "not set"))
Handler.address_string = lambda self: "a socket"
socketserver.UnixStreamServer(address, Handler).serve_forever()
"""
FAILING = """
import sys
print("(EngineCore pid=7) WARNING 11-21 19:45:14 [base.py:380] ValueError: harmless")
print("(Worker pid=9) ERROR 11-21 19:45:22 [core.py:1] Traceback (most recent call last):")
print("(Worker pid=9) ERROR 11-21 19:45:22 [core.py:1] torch.OutOfMemoryError: CUDA out of memory")
print("(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
sys.exit(1)
"""


def program(tmp_path: Path, text: str) -> list[str]:
    """A command that runs `text` as a program, with a file for the ids of its processes as the first argument."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path), str(tmp_path / "pids")]


def read_pids(tmp_path: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while not (pids := (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(pid) for pid in pids]


def await_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{alive} are still there"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("victim", ["starter", "guard", "server"])
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path, victim: str) -> None:
    guard = subprocess.Popen(
        [sys.executable, str(GUARD), *program(tmp_path, SERVER), f"--uds={tmp_path}/socket"],
        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert guard.stdin is not None
    server, below = read_pids(tmp_path)
    if victim == "starter":
        guard.stdin.close()  # as its death would
    else:
        os.kill(guard.pid if victim == "guard" else server, signal.SIGKILL)
    guard.wait(10)
    await_gone([server])
    if victim == "guard":  # only the starter is left to end what is further below, as `VllmServer.death` does
        os.killpg(guard.pid, signal.SIGKILL)
    await_gone([below])


@linux
async def test_a_server_is_started_and_closed(tmp_path: Path) -> None:
    server = await VllmServer.start(CPU, program(tmp_path, SERVER), 1)
    pids = await asyncio.to_thread(read_pids, tmp_path)
    assert await server.replica.score([0, 0], "base") == [-1.0]
    assert (tmp_path / "pids.mode").read_text() == "0"
    await server.close()
    await asyncio.to_thread(await_gone, pids)


@linux
async def test_development_routes_are_open_to_this_user_only(tmp_path: Path) -> None:
    server = await VllmServer.start(CPU, program(tmp_path, SERVER), 1, with_control=True)
    pids = await asyncio.to_thread(read_pids, tmp_path)
    assert (tmp_path / "pids.mode").read_text() == "1"
    command = await asyncio.to_thread(Path(f"/proc/{pids[0]}/cmdline").read_text)
    socket = Path(command.split("--uds=")[1].rstrip("\0"))
    assert socket.parent.stat().st_mode & 0o077 == 0
    assert await server.replica.score([0, 0], "base") == [-1.0]
    await server.close()
    assert not socket.parent.exists()


@linux
@pytest.mark.parametrize("victim", [0, None])
async def test_the_death_of_a_server_is_noticed(tmp_path: Path, victim: int | None) -> None:
    server = await VllmServer.start(CPU, program(tmp_path, SERVER), 1)
    pids = await asyncio.to_thread(read_pids, tmp_path)
    os.kill(server._process.pid if victim is None else pids[victim], signal.SIGKILL)
    death = await asyncio.wait_for(server.death(), 10)
    assert isinstance(death, ProcessError)
    await asyncio.to_thread(await_gone, pids)
    await server.close()


async def test_a_failed_start_names_the_first_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProcessError, match=r"died: torch\.OutOfMemoryError: CUDA out of memory"):
        await VllmServer.start(CPU, program(tmp_path, FAILING), 1)
    assert "See root cause above" in capfd.readouterr().err  # all of its output is in our log


def test_the_command_line() -> None:
    config = VllmConfig(
        max_running=8,
        flags={"max_loras": 3, "tensor_parallel_size": 2, "block-size": 32, "enable_prefix_caching": False, "override": ["a", "b"]},
    )  # fmt: skip
    command = server_command(CPU, "some/model", config, INFO, lora_rank=9)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert {"--model=some/model", "--max-lora-rank=16", "--max-loras=3", "--max-num-seqs=8"} <= set(command)
    assert {"--max-model-len=129", "--logprobs-mode=processed_logprobs", "--generation-config=vllm"} <= set(command)
    assert {"--tensor-parallel-size=2", "--block-size=32", "--no-enable-prefix-caching"} <= set(command)
    assert command[-3:] == ["--override", "a", "b"]
    on_gpu = server_command(
        Installation(sys.executable, "0.32.0", "2.13.0", "cuda"), "m", config, INFO,
        lora_rank=9,
    )  # fmt: skip
    assert set(command) - set(on_gpu) >= {"--enforce-eager", "--no-enable-chunked-prefill"}


@pytest.mark.parametrize(
    ("device", "sleeps", "asked"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_sleep_mode_is_enabled_on_cuda_for_an_engine_that_sleeps(device: Any, sleeps: bool, asked: bool) -> None:
    installation = Installation(sys.executable, "0.32.0", "2.13.0", device)
    command = server_command(installation, "m", VllmConfig(), INFO, lora_rank=9, sleeps=sleeps)
    assert ("--enable-sleep-mode" in command) == asked


def test_a_rank_above_vllms_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="up to rank 512, got 513"):
        server_command(CPU, "m", VllmConfig(), INFO, lora_rank=513)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    environment = server_environment(CPU, "secret", 3)
    assert "PYTHONPATH" not in environment
    assert environment["VLLM_API_KEY"] == "secret"
    assert (environment["VLLM_CPU_KVCACHE_SPACE"], environment["OMP_NUM_THREADS"]) == ("7", "3")
    on_gpu = server_environment(Installation("python", "0.32.0", "2.13.0", "cuda"), "secret", None)
    assert "TORCH_COMPILE_DISABLE" not in on_gpu
    assert on_gpu["VLLM_SERVER_DEV_MODE"] == "0", "its routes ask for no key"


def fake_python(tmp_path: Path, vllm: str | None, cpu: str | None, torch: str | None) -> str:
    """A fake interpreter that reports these versions."""
    path = tmp_path / "python"
    answer = str({"vllm": vllm, "vllm-cpu": cpu, "torch": torch}).replace("'", '"').replace("None", "null")
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return str(path)


def test_matching_installations_are_accepted(tmp_path: Path) -> None:
    python = fake_python(tmp_path, None, "0.32.0", "2.13.0+cpu")
    assert find_installation(python) == Installation(python, "0.32.0", "2.13.0+cpu", "cpu")
    python = fake_python(tmp_path, "0.26.1", None, "2.11.0")
    assert find_installation(python) == Installation(python, "0.26.1", "2.11.0", "cuda")
    assert (
        find_installation(fake_python(tmp_path, "0.99.0", None, "3.0.0")).vllm == "0.99.0"
    )  # nothing known against it


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ((None, None, "2.13.0"), "has no vLLM"),
        (("0.32.0", None, None), "has no vLLM"),
        (("0.32.0", None, "2.11.0"), "built for torch 2.13"),
    ],
)
def test_mismatched_installations_are_refused(
    tmp_path: Path, versions: tuple[str | None, str | None, str | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_installation(fake_python(tmp_path, *versions))


def test_a_missing_interpreter_is_reported() -> None:
    with pytest.raises(ConfigError, match="does not run as a Python interpreter"):
        find_installation("/nowhere/python")


# -- settings --


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "mps"}, "no device"),
        ({"flags": {"--max-model-len": 5}}, "is the field `max_context`"),
        ({"flags": {"logprobs_mode": "raw_logprobs"}}, "decides what log-probs mean"),
        ({"flags": {"trust_remote_code": True}}, "would run code"),
        ({"urls": ["http://a"], "flags": {"block_size": 32}}, "for a server that ART starts"),
        ({"urls": ["http://a"], "weights": "merged"}, "needs a server that ART starts"),
        ({"urls": ["http://a"], "replicas": 2}, "`urls` names servers that run"),
        ({"kv_cache_tokens": 64}, "Extra inputs"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VllmConfig.model_validate(settings)


def test_the_number_of_gpus_follows_from_the_flags() -> None:
    assert VllmConfig().num_devices == 1
    flags = {"tensor_parallel_size": 4, "data-parallel-size": 2, "block_size": 32}
    assert VllmConfig(flags=flags).num_devices == 8


def test_the_placement_of_vllm() -> None:
    four = Devices(gpus=tuple(Gpu("gpu", 2**36, str(i)) for i in range(4)), memory_bytes=2**36, has_mps=False)
    parallel = ModelSettings(engine=VllmConfig(flags={"tensor_parallel_size": 2}))
    assert choose_placement(parallel, four).engine == AssignedDevices("cuda", (1, 2))
    pinned = ModelSettings(engine=VllmConfig(device_indices=(2, 3)))
    assert choose_placement(pinned, four).engine == AssignedDevices("cuda", (2, 3))
    none = Devices(gpus=(), memory_bytes=2**30, has_mps=False)
    elsewhere = ModelSettings(engine=VllmConfig(urls=("http://gpu",)))
    placement = choose_placement(elsewhere, none)
    assert (placement.engine.kind, placement.shared) == ("elsewhere", False)
    check_placement(placement, elsewhere, none)


def test_the_kind_of_engine_is_part_of_the_settings() -> None:
    for engine in (EngineConfig(max_context=64), VllmConfig(max_context=64)):
        settings = ModelSettings(engine=engine)
        assert ModelSettings.model_validate_json(settings.model_dump_json()).engine == engine
    assert ModelSettings.model_validate({"engine": {"max_context": 64}}).engine == EngineConfig(max_context=64)
    with pytest.raises(ValidationError, match="'torch', 'vllm'"):
        ModelSettings.model_validate({"engine": {"kind": "other"}})
    with pytest.raises(ConfigError, match="vLLM engine cannot round alike"):
        ModelSettings(engine=VllmConfig(), trainer=TrainerConfig(quantization="nf4"))
    with pytest.raises(ConfigError, match="vLLM engine serves LoRA adapters"):
        ModelSettings(engine=VllmConfig(), lora=None)
    ModelSettings(engine=VllmConfig(weights="merged"), lora=None)
    with pytest.raises(ConfigError, match="each model has an engine of its own"):
        ServerConfig(models=("base",), settings=ModelSettings(engine=VllmConfig(weights="merged")))
