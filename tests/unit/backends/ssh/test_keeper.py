"""The program on the other machine, where accounts, locales and moments are unusual."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from art.backends.ssh import keeper


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("KEY", "SETTINGS", "STATE", "ENVIRONMENT", "SERVER_LOG", "INSTALL_LOG", "INSTALLED"):
        monkeypatch.setattr(keeper, name, tmp_path / getattr(keeper, name).name)
    monkeypatch.setattr(keeper, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(keeper, "FOLDER", tmp_path)
    return tmp_path


def set_python(folder: Path, script: str) -> None:
    (folder / "python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "python").chmod(0o755)


def test_somebody_who_asks_at_the_same_moment_is_not_taken_for_the_keeper(folder: Path) -> None:
    with keeper.locked("keeper", 0.0, kind=fcntl.LOCK_SH) as is_ours:  # what `is_running` does in another process
        assert is_ours
        assert not keeper.is_running()
    with keeper.locked("keeper", 0.0):
        assert keeper.is_running()


def test_a_keeper_that_ends_at_once_is_quoted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"api_key": "key", "config": {}, "port": 0}
    monkeypatch.setattr(keeper, "request", lambda: asked)
    set_python(folder, """echo '{"port": 0, "failure": "port 5000 is in use"}' > state.json""")
    assert keeper.start()["failure"] == "port 5000 is in use"
    set_python(folder, "echo no such library >&2; exit 1")
    with pytest.raises(keeper.Refused, match="did not start:\nno such library"):
        keeper.start()


def test_the_index_that_is_asked_for_wins_over_that_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://other/simple")
    set_python(folder, 'echo "index $PIP_INDEX_URL"; cat "$PIP_CONFIG_FILE"')
    with (folder / "log").open("w+") as log:
        keeper.pip({"target": "art", "index_url": "https://ours/simple"}, log)
        log.seek(0)
        assert log.read() == "index \n[global]\nindex-url = https://ours/simple\n"


def test_a_log_that_is_too_large_is_moved_away_while_the_server_writes(tmp_path: Path) -> None:
    (tmp_path / "keeper.py").write_bytes(Path(keeper.__file__).read_bytes())
    (tmp_path / "settings.json").write_text('{"port": 0}')
    (tmp_path / "venv/bin").mkdir(parents=True)
    server = (
        "#!/bin/sh\nseq 2000\nwhile [ ! -e server.log.old ]; do sleep 0.1; done\necho more\ntouch wrote\nread end\n"
    )
    (tmp_path / "venv/bin/python").write_text(server)
    (tmp_path / "venv/bin/python").chmod(0o755)
    program = "import keeper; keeper.MAX_LOG_BYTES, keeper.ROTATE_EVERY_S = 5000, 0.0; keeper.supervise()"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "wrote").exists():
            assert time.monotonic() < deadline, "the log was never moved"
            time.sleep(0.02)
        assert json.loads((tmp_path / "state.json").read_text())["num_starts"] == 1
    finally:
        process.terminate()
        process.wait(60)
    assert (tmp_path / "server.log.old").read_text().startswith("1\n2\n3\n")
    assert (tmp_path / "server.log").read_text() == "more\n"


def test_a_locale_that_lacks_characters_does_not_stop_an_installation(tmp_path: Path) -> None:
    (tmp_path / "keeper.py").write_bytes(Path(keeper.__file__).read_bytes())
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\ncase $* in *install*) printf 'Building caf\\303\\251 \\377\\n';; *) echo 1.0;; esac\n"
    )
    python.chmod(0o755)
    asked = {"target": "art", "digest": "x", "index_url": None, "timeout_s": 60}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "keeper.py"), "install"], input=json.dumps(asked).encode(), capture_output=True,
        timeout=120, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert b'answer {"digest": "x", "version": "1.0"}' in done.stdout, done
    assert "Building caf" in done.stdout.decode()
