"""What commands print: other people's text as it is, keys alone on standard output, no traceback when nobody reads."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from rich.table import Table
from rich.text import Text

import art.cli
from art.cli import server, status
from art.cli.main import main
from art.cli.output import EXIT_PIPE
from art.client import terminal
from art.client.client import ServerClient
from art.client.terminal import ProgressLine
from art.protocol.training import JobStatus
from art.rewards import judge_client
from art.storage.keys import KeyStore
from art.storage.trajectories import append_groups
from art.trajectory import Trajectory, TrajectoryGroup
from art_recipes import judge_command as judge
from art_recipes.screen import ProgressPrinter, Screen, print_page_line
from art_recipes.training.progress import Progress
from tests.support.fake_art_server import FakeArtServer

COMMANDS = sorted(Path(art.cli.__file__).parent.rglob("*.py"))
FOREIGN = "pip install 'x[rewards]' :warning: [/red] [bold]"


# -- foreign text --


def test_foreign_text_is_shown_as_it_is() -> None:
    shown = io.StringIO()
    screen = Screen(file=shown, width=200, force_terminal=True)
    screen.print(FOREIGN, style="red")
    table = Table(title=FOREIGN)
    table.add_column(FOREIGN)
    table.add_row(FOREIGN)
    screen.print(table)
    plain = Text.from_ansi(shown.getvalue()).plain
    assert plain.count(FOREIGN) >= 4


# -- a reader that goes away --


def test_no_traceback_when_nobody_reads(tmp_path: Path) -> None:
    KeyStore(tmp_path / "keys.db").close()
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "art.cli.main", "keys", "list", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr.decode()) == (EXIT_PIPE, "")


# -- keys and status of folders where no server ever ran --


@pytest.mark.parametrize(
    "command", [["keys", "list"], ["keys", "create", "--name", "ci"], ["keys", "revoke", "x"], ["status"]]
)
def test_a_folder_without_a_server_says_so(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ART_SERVER_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(command) == 1
    assert f"no art-server has ever run on {tmp_path / '.art'}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_keys_may_be_made_before_the_first_start_of_a_named_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "srv")
    assert main(["keys", "list", "--data-dir", folder]) == 1
    assert not (tmp_path / "srv").exists()
    capsys.readouterr()
    assert main(["keys", "create", "--name", "alice", "--data-dir", folder]) == 0
    printed = capsys.readouterr()
    store = KeyStore(tmp_path / "srv" / "keys.db")
    assert store.find(printed.out.strip()).name == "alice"
    store.close()
    assert f"no art-server has run on {folder} yet" in printed.err


# -- a file in place of a terminal, and a program that is not on PATH --


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(terminal, "RENEWAL_S", 0.01)
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    screen = Screen(file=shown, width=60)
    with ProgressLine("steps") as line:
        line.update(3, 30, "reward \x1b[31m 0.5 and a long tail")
        while "steps" not in shown.getvalue():
            time.sleep(0.01)
        screen.print("step 3", highlight=False)
    renewed = shown.getvalue().split("\r")[1]
    assert len(renewed) == 39, "it fits into the terminal"
    assert "steps 3/30, 0 s left  reward ?[31m" in renewed
    assert "step 3\n" in shown.getvalue()


def test_without_a_terminal_a_line_is_printed_where_nothing_else_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "SILENCE_S", 0.2)
    with ProgressLine("steps") as line, ProgressLine(""):
        line.update(3, 30)
        time.sleep(0.3)
        assert capsys.readouterr().err == "", "the inner line is the one that is shown, and has nothing to say"
    with ProgressPrinter(Screen()) as printer:
        for step in range(1, 6):
            printer(Progress(f"step {step}", part="steps", done=step, total=30))
            time.sleep(0.1)
        printed = capsys.readouterr()
        assert (printed.out.splitlines(), printed.err) == ([f"step {step}" for step in range(1, 6)], "")
        time.sleep(0.45)
    assert re.fullmatch(r"steps 5/30, \d s left\n(steps 5/30, \d s left\n)?", capsys.readouterr().err)


def test_what_is_left_is_told_by_the_pace_since_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    line = ProgressLine()
    line.begin("steps", 10, 30)
    assert line.text() == "steps 10/30", "steps of an earlier call have no pace"
    now = 100.0
    line.update(12, 30)
    assert line.text() == "steps 12/30, 15 min left"
    now = 400.0
    assert line.text() == "steps 12/30, 10 min left"
    line.begin("export")
    now = 430.0
    assert line.text() == "export, 30 s"
    now += 3700.0
    assert line.text() == "export, 1 h 2 min"


def test_a_warm_start_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(terminal, "SILENCE_S", 0.01)
    assert main(["tiny-model", str(tmp_path / "tiny"), "--task", "yes_no_maybe", "--warm-start-steps", "9"]) == 0
    printed = capsys.readouterr()
    first, _ = printed.out.splitlines()
    assert first.endswith(": a warm start of about a minute on an idle core")
    assert re.search(r"^warm start \d/9, \d s left  loss \d\.\d{3}$", printed.err, re.MULTILINE)


def test_the_command_for_the_page_can_be_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def line() -> str:
        console = Screen(file=io.StringIO())
        print_page_line(console, Path("/data"))
        shown: str = console.file.getvalue()  # type: ignore[attr-defined]
        return shown

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [".venv/bin/art", "demo"])
    assert line() == "the page    .venv/bin/art view /data\n"
    (tmp_path / "art").touch(mode=0o755)
    assert line() == "the page    art view /data\n"


# -- status of a server elsewhere --


def test_status_of_a_server_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeArtServer()
    job = JobStatus(job_id="j1", kind="train", project="p", name="m", state="queued", queue_place=2)
    server.jobs["j1"] = job
    asked: list[tuple[str, str | None]] = []

    def client(url: str, key: str | None, **options: object) -> ServerClient:
        asked.append((url, key))
        return server.client()

    cards = [("p/m", "p", 3), ("p/m@promoted", "p", 2), ("p//data/tiny", "p", 0), ("q//data/tiny", "q", 0)]
    models = [
        {"id": name, "owned_by": project, "base_model": "/data/tiny", "step": step} for name, project, step in cards
    ]
    answers = [None, lambda request: httpx2.Response(200, json={"data": models})]
    monkeypatch.setattr(status, "ServerClient", client)
    monkeypatch.setenv("ART_SERVER_URL", "http://gpu-machine:5000")
    monkeypatch.setenv("ART_API_KEY", "k")
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "art-server at http://gpu-machine:5000" in shown
    assert "Models\n  none\n\nBase models\n  none\n" in shown
    assert "j1: train of p/m, queued at place 2" in shown
    assert asked == [("http://gpu-machine:5000", "k")]
    server.trouble = answers
    assert main(["status"]) == 0
    expected = "Models\n  p/m: step 3, /data/tiny\n  p/m@promoted: step 2, /data/tiny\n\nBase models\n  /data/tiny\n"
    assert expected in capsys.readouterr().out
    assert main(["status", "--data-dir", str(tmp_path)]) == 1, "a folder that is named counts more than the variable"
    assert "no art-server has ever run on" in capsys.readouterr().err


# -- a judge whose library is missing --


@pytest.mark.parametrize("equal", [False, True])
def test_a_judge_that_cannot_be_asked_gets_no_table(
    equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge_client, "_has_litellm", lambda: False)
    question = {"role": "user", "content": "How many moons has Mars?"}
    groups = [
        TrajectoryGroup(
            Trajectory(messages_and_choices=[question, {"role": "assistant", "content": "2" if equal else str(i)}])
            for i in range(2)
        )
    ]
    append_groups(tmp_path / "groups.jsonl", groups)
    command = ["judge", "check", str(tmp_path / "groups.jsonl"), "--judge", "openai/o3"]
    if equal:
        command += ["--judge-url", "http://127.0.0.1:9/v1"]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.out.strip() == ""
    expected = "trajectories of each group are equal" if equal else judge_client.INSTALL
    assert expected in printed.err
    assert "[rewards]" in judge_client.INSTALL


def test_a_judge_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def check(*_: object, **__: object) -> object:
        return judge.JudgeReport(num_groups=2, num_trajectories=4, num_questions=0, faults=["pip install 'x[y]'"] * 2)

    monkeypatch.setattr(judge, "check_judge", check)
    message = {"role": "user", "content": "a"}
    group = TrajectoryGroup(Trajectory(messages_and_choices=[message]) for _ in range(2))
    append_groups(tmp_path / "groups.jsonl", [group])
    common = ["judge", "check", str(tmp_path / "groups.jsonl"), "--judge", "o", "--judge-url", "http://127.0.0.1:9/v1"]
    assert main(common) == 1
    assert "o scored none of 2 groups: pip install 'x[y]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["train", "yes_no_maybe", "--base-model", "b"], ["mcp-rl", "http://a/mcp", "--model", "b"]]
)
def test_a_judge_that_cannot_be_asked_ends_a_training_before_it_starts(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge_client, "_has_litellm", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--judge", "openai/o3"]) == 1
    assert judge_client.INSTALL in capsys.readouterr().err
    assert list(tmp_path.rglob("art.db")) == [], "no server was started"


# -- keys that no header can hold --


def test_a_server_takes_no_key_that_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ART_API_KEY", "s3cret of two words")
    assert server.main(["--port", "0"]) == 1
    printed = capsys.readouterr().err
    assert "the API key has a space at place 7 of 19" in printed
    assert "s3cret" not in printed
