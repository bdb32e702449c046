from __future__ import annotations

from pathlib import Path

import pytest

from art.storage import logs


def test_a_long_log_is_moved_away_when_its_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10)
    path = tmp_path / "logs" / "server.log"
    for text in (b"first run, long\n", b"second, long too\n", b"third\n", b"fourth\n"):
        with logs.open_log(path) as file:
            file.write(text)
    assert path.with_name("server.log.old").read_bytes() == b"second, long too\n"
    assert path.read_bytes() == b"third\nfourth\n"


def test_a_long_log_is_moved_away_while_its_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10)
    path = tmp_path / "engine.log"
    logs.rotate_log(path)  # there is none yet
    with logs.open_log(path) as file:
        for text in (b"short\n", b"now too long\n", b"last\n"):
            file.write(text)
            file.flush()
            logs.rotate_log(path)
    assert path.with_name("engine.log.old").read_bytes() == b"short\nnow too long\n"
    assert path.read_bytes() == b"last\n"
    assert logs.log_since(path, 2) == "st\n"
    assert logs.log_since(path, 1000) == ""


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert logs.log_tail(path) == ""
    path.write_bytes(b"\xff" * 100_000 + b"\n" + "".join(f"line {i}\n" for i in range(100)).encode())
    assert logs.log_tail(path, 2) == f"\nLast lines of {path}:\n  line 98\n  line 99"
