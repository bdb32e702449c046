"""Ctrl-C in a terminal reaches every process of the foreground group: what scripts and commands print then."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = [str(ROOT / "examples/quickstart/quickstart.py")]
ART = ["-m", "art.cli.main"]
TASK = ["yes_no_maybe", "--base-model", "./tiny"]


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    (tmp_path / "tiny").symlink_to(tiny_model)
    return tmp_path


def interrupted(
    arguments: list[str], folder: Path, *, after: str | Path, delay_s: float = 0.0
) -> tuple[int, list[str], str]:
    """Exit status, the lines on stderr after Ctrl-C, and stdout.

    Args:
        after: what Ctrl-C comes after: a pattern on stdout, or a file in the folder.
        delay_s: from then on.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    said: list[str] = []
    complained: list[str] = []
    readers = [
        threading.Thread(target=lambda: said.extend(process.stdout or ())),
        threading.Thread(target=lambda: complained.extend(process.stderr or ())),
    ]
    for reader in readers:
        reader.start()
    try:
        deadline = time.monotonic() + 150
        while not (re.search(after, "".join(said)) if isinstance(after, str) else (folder / after).exists()):
            assert time.monotonic() < deadline, "".join(said)
            assert process.poll() is None, "".join(complained)
            time.sleep(0.01)
        time.sleep(delay_s)
        num_before = len(complained)  # e.g. findings of a step
        os.killpg(process.pid, signal.SIGINT)
        process.wait(20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for reader in readers:
        reader.join()
    return process.returncode, [line.rstrip() for line in complained[num_before:] if line.strip()], "".join(said)


@pytest.mark.slow
def test_the_quick_start_stops_with_one_line(folder: Path) -> None:
    status, lines, _ = interrupted(QUICKSTART, folder, after="step +1 ", delay_s=0.1)
    assert status == -signal.SIGINT
    (line,) = lines
    assert re.fullmatch(r"stopped at step \d+; run the same script again and it goes on", line)


@pytest.mark.slow
def test_the_same_script_goes_on(folder: Path) -> None:
    _, lines, _ = interrupted(QUICKSTART, folder, after="step +3 ", delay_s=0.1)
    step = int(re.findall(r"stopped at step (\d+)", lines[0])[0])
    _, _, output = interrupted(QUICKSTART, folder, after=r"step +\d+ ")
    first = int(re.findall(r"step +(\d+) ", output)[0])
    assert step >= 3
    assert first - step in (1, 2), "a step that was under way may be finished first"


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.5, 2.0])
def test_the_quick_start_stops_with_one_line_while_it_starts(folder: Path, delay_s: float) -> None:
    _, lines, _ = interrupted(QUICKSTART, folder, after=Path(".art/logs/server.log"), delay_s=delay_s)
    assert len(lines) == 1, lines
    assert lines[0].startswith("stopped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "after", "said"),
    [
        (["train", *TASK, "--steps", "500"], "step +2", r"stopped at step \d+; run the same command again"),
        (["train", *TASK], "stands at", "stopped at step 0; run the same command again and it goes on"),
        (
            ["demo", "--task", *TASK, "--held-out", "9", "--out", "out"],
            "step +2",
            r"stopped at step \d+; every finished",
        ),
        (["demo", "--task", "yes_no_maybe", "--out", "out"], "ART demo", "stopped before the training began"),
        (["tiny-model", "model"], "", "art: stopped"),
        (["doctor", "./tiny", "--task", "yes_no_maybe"], "", "art: stopped"),
    ],
    ids=["train", "first step", "demo", "warm start", "tiny-model", "doctor"],
)
def test_commands_say_where_they_stopped(folder: Path, arguments: list[str], after: str, said: str) -> None:
    status, lines, output = interrupted([*ART, *arguments], folder, after=after, delay_s=3.0 if not after else 0.3)
    assert status == 130
    assert "Traceback" not in output + "".join(lines)
    assert len(lines) <= 1
    assert re.search(said, output + "".join(lines)), output


@pytest.mark.slow
def test_a_server_ends_without_a_word(folder: Path) -> None:
    arguments = ["-m", "art.cli.server", "--data-dir", "data", "--port", "0"]
    status, lines, output = interrupted(arguments, folder, after="art-server listens", delay_s=0.5)
    assert (status, lines) == (0, [])
    assert "Traceback" not in output
