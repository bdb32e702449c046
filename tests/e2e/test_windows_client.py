"""A client that looks like one on Windows trains on a server that runs as ever: the way of a laptop to a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import art

ROOT = Path(__file__).parents[2]
AS_WINDOWS = ["-W", "ignore::EncodingWarning", "-X", "warn_default_encoding", "-m", "tests.support.windows"]


async def test_a_client_without_what_windows_lacks_trains(
    shared_backend: art.LocalBackend, tiny_model: Path, tmp_path: Path
) -> None:
    client = await shared_backend.open()
    environment = os.environ | {
        "ART_SERVER_URL": client.base_url, "ART_API_KEY": client.api_key or "", "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "cp1252",
    }  # fmt: skip

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *AS_WINDOWS, *words], cwd=tmp_path, env=environment, capture_output=True, timeout=200
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
        return done.stdout.decode("cp1252")

    said = run(str(ROOT / "tests/support/windows_client.py"), str(tiny_model), "1")
    assert re.findall(r"pipeline trained step (\d)", said) == ["2", "3"]
    assert re.findall(r"tracker got step (\d)", said) == ["1", "2", "3"]
    assert "state {'where': 'Zürich'}, step 3" in said
    assert "log said tools are ready" in said
    files = {
        Path(root, name).relative_to(tmp_path).as_posix() for root, _, names in os.walk(tmp_path) for name in names
    }
    log = ".art/windows/models/agent/"
    written = {"history.jsonl", "pipeline/journal.db", "state.json", "trajectories/train/0003.jsonl"}
    assert {log + name for name in written} <= files
    assert not [path for path in files if ".tmp-" in path]
    (tmp_path / "commands.py").write_text(
        "from art.cli.main import main\n"
        "assert main(['checkpoints', 'list', 'windows/agent']) == 0\n"
        "assert main(['checkpoints', 'download', 'windows/agent', 'here', '--step', '1']) == 0\n"
        "assert main(['status']) == 0\n"
    )
    said = run(str(tmp_path / "commands.py"))
    assert "newest" in said
    assert (tmp_path / "here/adapter_config.json").is_file()
    assert "windows/agent: step 3" in said
