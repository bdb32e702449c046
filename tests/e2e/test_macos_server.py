"""A server whose modules take this machine for a Mac trains, tells its state, and ends with its processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef0123"
DEADLINE_S = 100.0


def until_told(log: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if told := re.search(r"listens on (http://\S+)", log.read_text(encoding="utf-8")):
            return told[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_server_without_what_macos_lacks_trains(tiny_model: Path, tmp_path: Path) -> None:
    as_mac = os.environ | {
        "PYTHONPATH": f"{ROOT / 'tests/support/macos'}{os.pathsep}{ROOT}", "ART_API_KEY": KEY, "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    log, data = tmp_path / "server.log", tmp_path / "data"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "art.cli.server", "--port", "0", "--data-dir", str(data)]
        server = subprocess.Popen(command, env=as_mac, stdout=output, stderr=output, cwd=tmp_path)
    children: list[psutil.Process] = []
    try:
        url = until_told(log)
        client = subprocess.run(
            [sys.executable, str(ROOT / "tests/support/windows_client.py"), str(tiny_model), "1"],
            env=os.environ | {"PYTHONPATH": str(ROOT), "ART_SERVER_URL": url, "ART_API_KEY": KEY}, cwd=tmp_path,
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert client.returncode == 0, client.stderr[-3000:] + log.read_text(encoding="utf-8")[-3000:]
        assert re.findall(r"pipeline trained step (\d)", client.stdout) == ["2", "3"]
        children = psutil.Process(server.pid).children(recursive=True)
        assert ["warm_parent" in " ".join(child.cmdline()) for child in children] == [False, False]
        status = subprocess.run(
            [sys.executable, "-m", "art.cli.main", "status", "--data-dir", str(data)], env=as_mac, capture_output=True,
            text=True, timeout=100,
        )  # fmt: skip
        assert f"trainer of {tiny_model}: up on cpu" in status.stdout, status.stderr
    finally:
        server.terminate()
        server.wait(30)
    gone, left = psutil.wait_procs(children, timeout=30)
    assert (len(gone), left) == (2, [])
