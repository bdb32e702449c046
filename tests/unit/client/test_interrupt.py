"""What a program says when Ctrl-C ends it: where training stands, in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from art.cli.main import main
from art.client import terminal
from art_recipes import tiny_model_command

PROGRAM = """
import asyncio, os, signal, sys
from art.client.terminal import forget_steps, note_step

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
    monkeypatch.setattr(terminal, "_steps", {})
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


def interrupt_it(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_command_that_is_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tiny_model_command, "run", interrupt_it)
    terminal.note_step("shop/a", 7)
    assert main(["tiny-model", "out"]) == 130
    assert capsys.readouterr().err.strip() == "art: stopped at step 7"
