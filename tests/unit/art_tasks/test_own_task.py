"""A task of one's own in the working directory: how commands find it, and what they say when it cannot be used."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from art.cli.main import main
from art.errors import ConfigError
from art.task import Task, draw_conversations, draw_scenarios, get_task, list_tasks
from art.trajectory import Trajectory
from art_recipes import demo_command
from art_recipes.training.training_loop import headline_value

ECHO = """
from art.task import Conversation, Task
from art.trajectory import Trajectory


class Echo(Task):
    name = "echo"
    description = "say it again"

    def scenarios(self, split, *, seed, count):
        return [self.scenario(split, seed, index, {}) for index in range(count)]

    async def rollout(self, model, scenario, *, rollout_index=0, step=None):
        return Trajectory(messages_and_choices=[], reward=0.0)

    def warm_start_conversations(self, rng, count):
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        return [Conversation(messages=said) for _ in range(count)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the task in `echo_task.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr("sys.modules", dict(sys.modules))
    (tmp_path / "echo_task.py").write_text(ECHO)
    return tmp_path


class Built(Exception):
    """Ends a command at the point where it would make a tiny model."""


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "echo_task:Echo"],
        ["demo", "--task", "echo_task:Echo"],
        ["tiny-model", "out", "--task", "./echo_task.py:Echo"],
    ],
)
def test_the_tiny_model_is_made_for_the_task_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    given: list[Task] = []

    def build(console: Console, path: Path, *, task: Task, **rest: Any) -> None:
        given.append(task)
        raise Built

    command = arguments[0].replace("-", "_")
    monkeypatch.setattr(f"art_recipes.{command}_command.build_with_progress", build)
    with pytest.raises(Built):
        main(arguments)
    assert [type(task).__name__ for task in given] == ["Echo"]


def test_a_base_model_of_ones_own_needs_no_tiny_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_command, "build_with_progress", lambda *_, **__: pytest.fail("a tiny model was made"))
    used: list[str] = []

    async def trained(task: Task, **settings: Any) -> None:
        used.append(settings["base_model"])
        raise Built

    monkeypatch.setattr(demo_command, "train", trained)
    with pytest.raises(Built):
        main(["demo", "--task", "echo_task:Echo", "--base-model", "Qwen/Qwen3-0.6B"])
    assert used == ["Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "ecko:Echo"], "task 'ecko:Echo': there is no module 'ecko'"),
        (["demo", "--task", "no_such"], "no task is named 'no_such'. "),
        (["tiny-model", "out", "--task", "echo_task:Ecko"], "echo_task.py has no `Ecko`; it defines Echo"),
        (["doctor", "./tiny", "--task", "./ecko.py:Echo"], "there is no module './ecko.py'"),
        (["train", "art_recipes.dataset_task:DatasetTask"], "DatasetTask() failed: TypeError: "),
    ],
)
def test_a_wrong_name_is_found_before_torch_is_loaded(folder: Path, arguments: list[str], said: str) -> None:
    probe = (
        "import sys\nfrom art.cli.main import main\n"
        f"sys.path.append('.')\nstatus = main({arguments!r})\n"
        "sys.exit(99 if {'torch', 'transformers'} & set(sys.modules) else status)"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("art: ")
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["echo_task.py"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    async def rollout", "    async def roll_out", "class Echo does not implement rollout"),
        ('    name = "echo"\n', "", 'class Echo has no string name; add e.g. `name = "echo"`'),
        ('name = "echo"', 'name = "my echo"', "its `name` must be 1-128 letters, .*; got 'my echo'"),
        ('    description = "say it again"\n', "    description = 3\n", "class Echo has no string description"),
        ("class Echo(Task):", "class Echo(Task)", r"broken\.py, line 6\): SyntaxError: expected ':'"),
        (
            "class Echo(Task):",
            "import no_such_library\n\nclass Echo(Task):",
            r"broken\.py, line 6\): ModuleNotFoundError",
        ),
        ("class Echo(Task):", "class Echo(Tusk):", r"broken\.py, line 6\): NameError: name 'Tusk'"),
        ("class Echo(Task):", "class Echo:", "expected a Task or a subclass of it, got <class"),
        (
            '    name = "echo"',
            '    name = "echo"\n    def __init__(self): self.a = 1 / 0',
            r"Echo\(\) failed .*line 8\): Zero",
        ),
    ],
)
def test_what_is_wrong_with_a_task_is_said(folder: Path, old: str, new: str, said: str) -> None:
    assert old in ECHO
    (folder / "broken.py").write_text(ECHO.replace(old, new))
    for path in ("broken:Echo", str(folder / "broken.py") + ":Echo"):
        with pytest.raises(ConfigError, match=rf"^task '{re.escape(path)}': .*{said}"):
            get_task(path)


def test_a_file_that_a_library_hides_is_found_by_its_path(folder: Path) -> None:
    (folder / "calendar.py").write_text(ECHO)
    with pytest.raises(ConfigError, match=r"calendar\.py has no `Echo`"):
        get_task("calendar:Echo")
    assert get_task("./calendar.py:Echo").name == "echo"
    assert type(get_task("./calendar.py:Echo")) is type(get_task("calendar.py:Echo")), "the file is run once"


def changed(folder: Path, old: str, new: str) -> Task:
    assert old in ECHO
    (folder / "changed.py").write_text(ECHO.replace(old, new))
    return get_task("./changed.py:Echo")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("range(count)", "range(3)", "'train', seed=0, count=4) returned 3 scenarios, expected 4"),
        ("range(count)", "range(9)", "returned 9 scenarios, expected 4"),
        ("        return [self.scenario", "        [self.scenario", "returned 0 scenarios"),
        ("self.scenario(split, seed, index, {})", "{}", "must return a list of `Scenario`.*; got {}"),
    ],
)
def test_scenarios_are_checked(folder: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace(")", r"\)")):
        draw_scenarios(changed(folder, old, new), "train", seed=0, count=4)


def test_a_held_out_split_may_have_fewer_scenarios(folder: Path) -> None:
    assert len(draw_scenarios(changed(folder, "range(count)", "range(3)"), "test", seed=0, count=4)) == 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("warm_start_conversations", "warm_start", "has no scripted play for the warm start"),
        ("        return [Conversation(", "        [Conversation(", "returned 0 conversations, expected 2"),
        ("Conversation(messages=said)", "said", "must return a list of `Conversation`"),
        ('"role": "assistant"', '"role": "user"', "must end with an assistant message"),
    ],
)
def test_play_is_checked(folder: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        draw_conversations(changed(folder, old, new), seed=0, count=2)


def test_a_headline_metric_that_no_rollout_sets(folder: Path) -> None:
    task = changed(folder, '"echo"', '"echo"\n    headline_metric = "win"')
    trajectory = Trajectory(messages_and_choices=[], reward=0.0, metrics={"num_moves": 3})
    with pytest.raises(ConfigError, match=r"`headline_metric` is 'win', but a rollout set only num_moves"):
        headline_value(task, trajectory)


def test_a_rollout_is_shown_with_its_tool_calls(folder: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
    messages: Any = [
        {"role": "user", "content": "begin"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
    ]
    shown = get_task("echo_task:Echo").render_trajectory(Trajectory(messages_and_choices=messages, reward=0.5))
    assert shown == 'user: begin\nassistant:\n  look {"at": 3}\ntool: nothing\nreward: 0.5'


def test_an_installed_package_may_add_a_prefix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ECHO.replace(
        "import Conversation, Task", "import Conversation, Task\nfrom art.task.interface import PlacedTask"
    )
    source = source.replace(
        "class Echo(Task):", "class Echo(PlacedTask):\n    place_word = 'PORT'\n    place_help = 'an echo'"
    )
    (folder / "far_echo.py").write_text(f"{source}\n    def __init__(self, port):\n        self.port = port\n")
    own = EntryPoint("echo:", "far_echo:Echo", "art.tasks")
    monkeypatch.setattr("art.plugins.find_plugins", lambda group: {"echo:": own} if group == "art.tasks" else {})
    monkeypatch.setattr("art.task.names.find_plugins", lambda group: {"echo:": own} if group == "art.tasks" else {})
    assert get_task("echo:7").label == "echo-7"
    assert list_tasks() == []
    for name, said in (("echo:", "write echo:PORT, an echo"), ("ecco", "echo:PORT  an echo")):
        with pytest.raises(ConfigError, match=said):
            get_task(name)
