"""`art new`: what it writes passes its own tests, is a task that ART finds, and is code that we would show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from art.cli.main import main
from art.cli.tasks import write_agent
from art.errors import ConfigError
from art.task import draw_conversations, draw_scenarios, get_task
from tests.support.docs_blocks import ROOT, commands_of, parser_for

AGENTS = {"nim_player": ("text", "NimPlayer"), "caller2": ("tool", "Caller2")}
PAGE = ROOT / "docs/your_own_agent.md"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An agent of each kind."""
    root = tmp_path_factory.mktemp("new")
    assert main(["new", str(root / "nim_player")]) == 0
    assert main(["new", str(root / "caller2"), "--tool"]) == 0
    return {kind: root / name for name, (kind, _) in AGENTS.items()}


def test_the_tests_of_new_agents_pass(folders: dict[str, Path]) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
            "-p", "no:langsmith_plugin", "-p", "no:schemathesis",  # seconds, and no new agent has them
            *map(str, folders.values()),
        ],
        cwd=folders["text"].parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b28 passed", done.stdout)
    assert "Warning" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", AGENTS)
def test_a_new_agent_is_a_task_with_play(name: str, folders: dict[str, Path]) -> None:
    kind, class_name = AGENTS[name]
    assert sorted(path.name for path in folders[kind].iterdir() if path.name != "__pycache__") == sorted(
        ["README.md", "pytest.ini", f"{name}.py", f"test_{name}.py"]
    )
    task = get_task(f"{folders[kind]}/{name}.py:{class_name}")
    assert task.name == name
    assert len(draw_scenarios(task, "train", seed=0, count=128)) == 128
    play = draw_conversations(task, seed=0, count=50, skill=0.5)
    assert all((conversation.tools is not None) == (kind == "tool") for conversation in play)


@pytest.mark.parametrize("name", AGENTS)
def test_commands_of_its_readme_exist_and_name_the_agent(name: str, folders: dict[str, Path]) -> None:
    kind, class_name = AGENTS[name]
    text = (folders[kind] / "README.md").read_text()
    commands = [
        words
        for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
        for words in commands_of(re.sub("^    ", "", block, flags=re.MULTILINE))
    ]
    ours = [arguments for program, *arguments in commands if program == "art"]
    assert {arguments[0] for arguments in ours} == {"demo", "doctor", "train"}
    for arguments in ours:
        assert f"{name}:{class_name}" in arguments
        parser = parser_for("art", arguments)
        assert parser is not None
        parser.parse_args(arguments)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, "README.md", "exec")
    assert "my_agent" not in text
    assert "MyAgent" not in text


def test_it_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / "some" / "my_agent")]) == 0
    said = capsys.readouterr().out
    assert f"cd {tmp_path}/some/my_agent\n" in said
    assert "art demo --task my_agent:MyAgent\n" in said


def test_an_empty_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hider").mkdir()
    monkeypatch.chdir(tmp_path / "hider")
    assert main(["new", "."]) == 0
    assert (tmp_path / "hider" / "hider.py").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-agent", "'my-agent' cannot be one: .* as 'my_agent'"),
        ("2nim", "'2nim' cannot be one: .* as 'my_agent'"),
        ("class", "'class' cannot be one"),
        ("_", "'_' cannot be one"),
        ("größe", "'größe' cannot be one"),
        ("tic_tac_toe", "'tic_tac_toe' is the name of a task that comes with ART"),
        ("statistics", "'statistics' is the name of a module that is installed here"),
        ("art", "'art' is the name of a module that is installed here"),
        ("pytest", "'pytest' is the name of a module that is installed here"),
        ("conversation", "'conversation' is a name that the agent's code uses itself"),
        ("feedback", "'feedback' is a name that the agent's code uses itself"),
    ],
)
def test_a_name_that_would_not_work_is_refused(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^the folder's name becomes that of a module, a class and a task; {said}"):
        write_agent(tmp_path / name, kind="text")
    assert not (tmp_path / name).exists()


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my_agent"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "a_file").write_text("mine")
    for path in (folder, tmp_path / "a_file"):
        assert main(["new", str(path)]) == 1
        assert f"art: {str(path)!r} exists already and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


# -- the page that explains it --
