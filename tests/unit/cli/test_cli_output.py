"""What commands print: other people's text as it is, keys alone on standard output, no traceback when nobody reads."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from rich.table import Table
from rich.text import Text

import art.cli
from art.cli import judge, server, status, tiny_model
from art.cli.main import main
from art.cli.output import EXIT_PIPE
from art.cli.screen import ProgressPrinter, Screen, print_page_line, progress_bar
from art.client import ArtClient
from art.protocol.training import JobStatus
from art.recipes import task_training
from art.recipes.mcprl import mcp_rl
from art.recipes.progress import Progress
from art.rewards.asking import completion
from art.storage.keys import KeyStore
from art.storage.trajectories import append_groups
from art.trajectory import Trajectory, TrajectoryGroup
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
    with screen.status(FOREIGN) as spinner:
        assert str(spinner.renderable.text) == FOREIGN  # type: ignore[attr-defined]
    plain = Text.from_ansi(shown.getvalue()).plain
    assert plain.count(FOREIGN) >= 4


def _calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "") for node in calls]
    return list(zip(names, calls, strict=True))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_no_command_reads_text_as_markup(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for name, call in _calls(tree):
        if name == "TextColumn":
            assert [ast.unparse(word.value) for word in call.keywords if word.arg == "markup"] == ["False"], call.lineno
        assert name not in ("Console", "from_markup"), f"line {call.lineno}: use Screen, styles and Text"
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text for text in texts if any(tag in text for tag in ("[/", "[bold]", "[red]", "[yellow]", "[green]"))]


# -- a reader that goes away --


def test_no_traceback_when_nobody_reads(tmp_path: Path) -> None:
    KeyStore(tmp_path / "keys.db").close()
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "art.cli.main", "keys", "list", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr.decode()) == (EXIT_PIPE, "")


def test_a_table_that_nobody_reads_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Screen(file=Gone()).print("one line")


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


# -- status of a warm start --


def test_status_shows_a_warm_start_as_long_as_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ART_SERVER_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with tiny_model._noted(tmp_path / "tiny") as note:
        note("step 3 of 600")
        killed = tmp_path / "state" / "art" / f"warm-start-{2**30}.txt"
        killed.write_text("left by a process that was killed")
        assert main(["status"]) == 0
    assert capsys.readouterr().out.endswith(f"Warm starts of tiny models\n  {tmp_path / 'tiny'}: step 3 of 600\n")
    assert main(["status"]) == 1
    assert "no art-server has ever run" in capsys.readouterr().err


# -- a file in place of a terminal, and a program that is not on PATH --


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_progress_bar_is_shown_in_a_terminal_only(is_terminal: bool) -> None:
    console = Screen(file=io.StringIO(), force_terminal=is_terminal, width=60)
    with progress_bar(console, "line") as progress:
        bar = progress.add_task("training", total=2, line="")
        progress.update(bar, completed=2, line="reward 0.5")
        progress.console.print("step 2")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("training" in shown) == is_terminal
    assert is_terminal or shown == "step 2\n"


def test_a_warm_start_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("art.cli.screen.SILENCE_S", 0.0)
    assert main(["tiny-model", str(tmp_path / "tiny"), "--task", "yes_no_maybe", "--warm-start-steps", "2"]) == 0
    first, one, two, _ = capsys.readouterr().out.splitlines()
    assert first.endswith(": a warm start of about a minute on an idle core")
    assert re.fullmatch(r"warm start, step 1/2  loss \d\.\d{3}  \d+\.\d s left", one)
    assert two.startswith("warm start, step 2/2")


def test_long_work_has_a_line_now_and_then_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    with ProgressPrinter(Screen(file=file)) as printer:
        printer(Progress("100 of 400 held-out rollouts", "busy"))
        monkeypatch.setattr("art.cli.screen.SILENCE_S", 0.0)
        printer(Progress("200 of 400 held-out rollouts", "busy"))
    assert file.getvalue() == "200 of 400 held-out rollouts\n"


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

    def client(url: str, key: str | None, **options: object) -> ArtClient:
        asked.append((url, key))
        return server.client()

    cards = [("p/m", "p", 3), ("p/m@promoted", "p", 2), ("p//data/tiny", "p", 0), ("q//data/tiny", "q", 0)]
    models = [
        {"id": name, "owned_by": project, "base_model": "/data/tiny", "step": step} for name, project, step in cards
    ]
    answers = [None, lambda request: httpx2.Response(200, json={"data": models})]
    monkeypatch.setattr(status, "ArtClient", client)
    monkeypatch.setenv("ART_SERVER_URL", "http://gpu-machine:5000")
    monkeypatch.setenv("ART_API_KEY", "k")
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "art-server at http://gpu-machine:5000" in shown
    assert "Models\n  none\n\nBase models\n  none\n" in shown
    assert "j1: train of p/m, queued at place 2" in shown
    assert asked == [("http://gpu-machine:5000", "k")]
    assert main(["status", "--stacks"]) == 1
    assert "--stacks needs --data-dir" in capsys.readouterr().err
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
    monkeypatch.setattr(completion, "_has_litellm", lambda: False)
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
    expected = "trajectories of each group are equal" if equal else completion.INSTALL
    assert expected in printed.err
    assert "[rewards]" in completion.INSTALL


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
    def start(**_: object) -> None:
        raise AssertionError("a server is started for a run that cannot be judged")

    monkeypatch.setattr(completion, "_has_litellm", lambda: False)
    monkeypatch.setattr(task_training, "LocalBackend", start)
    monkeypatch.setattr(mcp_rl, "LocalBackend", start)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--judge", "openai/o3"]) == 1
    assert completion.INSTALL in capsys.readouterr().err


# -- keys that no header can hold --


def test_a_server_takes_no_key_that_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ART_API_KEY", "s3cret of two words")
    assert server.main(["--port", "0"]) == 1
    printed = capsys.readouterr().err
    assert "the API key has a space at place 7 of 19" in printed
    assert "s3cret" not in printed
