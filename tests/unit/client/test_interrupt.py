"""What a program says when Ctrl-C ends it: where training stands, in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.cli import server, tiny_model
from art.cli.main import main
from art.client import interrupt

PROGRAM = """
import asyncio, os, signal, sys
from art.client.interrupt import forget_steps, note_step

async def main():
    note_step("shop/agent-1", None)
    note_step("shop/agent-1", 3)
    try:
        {body}
    finally:
        forget_steps(["shop/agent-1"])

asyncio.run(main())
{after}
"""
CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.fixture(autouse=True)
def own_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interrupt, "_steps", {})
    hook = sys.excepthook
    yield
    sys.excepthook = hook


def program(body: str, after: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", PROGRAM.format(body=body, after=after)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_ctrl_c_while_a_model_is_in_use_is_one_line() -> None:
    done = program(f"{CTRL_C}; await asyncio.sleep(60)")
    assert done.stderr == "stopped at step 3; run the same script again and it goes on\n"
    assert done.returncode == -2, "a shell sees that a signal ended it"


@pytest.mark.parametrize(
    ("body", "after", "options", "error"),
    [
        ("await asyncio.sleep(0)", CTRL_C, [], "KeyboardInterrupt"),
        (f"{CTRL_C}; await asyncio.sleep(60)", "", ["-X", "dev"], "KeyboardInterrupt"),
        ("raise ValueError('mine')", "", [], "ValueError: mine"),
        ("sys.excepthook = lambda *error: print('my own hook', file=sys.stderr); 1 / 0", "", [], "my own hook"),
    ],
    ids=["the models are closed", "development mode", "another error", "a hook of the user's"],
)
def test_what_keeps_its_traceback(body: str, after: str, options: list[str], error: str) -> None:
    done = program(body, after, *options)
    assert error in done.stderr
    assert "stopped at" not in done.stderr


def test_where_several_models_stand() -> None:
    assert interrupt.stopped() == "stopped"
    interrupt.note_step("shop/a", None)
    assert interrupt.stopped() == "stopped"
    interrupt.note_step("shop/a", 3)
    assert interrupt.stopped() == "stopped at step 3"
    interrupt.note_step("shop/b", 0)
    assert interrupt.stopped() == "stopped at step 3 of shop/a, at step 0 of shop/b"
    interrupt.forget_steps(["shop/a"])
    assert interrupt.stopped() == "stopped at step 0"


def interrupt_it(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_server_that_is_interrupted_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "_serve", interrupt_it)
    monkeypatch.setattr(server, "run_coroutine", lambda _: None)
    assert server.main(["--data-dir", str(tmp_path), "--port", "0"]) == 130
    assert capfd.readouterr().err.strip() == "art-server: stopped before it was ready"


def test_a_command_that_is_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tiny_model, "run", interrupt_it)
    interrupt.note_step("shop/a", 7)
    assert main(["tiny-model", "out"]) == 130
    assert capsys.readouterr().err.strip() == "art: stopped at step 7"


def test_ctrl_c_in_the_warm_start_of_a_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("art.cli.demo.build_with_progress", interrupted)
    assert main(["demo", "--task", "yes_no_maybe"]) == 130
    assert capsys.readouterr().out.endswith("\nstopped before the training began\n")
