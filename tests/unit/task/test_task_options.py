"""Options of a task: how they are read, what errors say, and the label made from them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import art.task.names as names
from art.errors import ConfigError
from art.storage.layout import validate_name
from art.task import TaskOptions, get_task, register_task
from art_tasks.openenv import OpenEnvTask
from art_tasks.verifiers import VerifiersTask
from tests.support.board_task import BoardOptions, BoardTask


class PlainTask(BoardTask):
    """A task without options, with an `__init__` of its own."""

    options_class = TaskOptions
    options = TaskOptions()  # type: ignore[assignment]
    tiny_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, place: str) -> None:
        self.place = place


made = PlainTask("here")
HERE = "tests.support.board_task:BoardTask"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_registered", {})
    register_task(BoardTask(chance=0.5))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("size", "3", 3), ("form", "tool", "tool"), ("chance", "0.25", 0.25), ("shows_history", "false", False),
        ("words", '["a", "b"]', ("a", "b")), ("goal", "32", 32), ("goal", "null", None), ("level", "2", 2),
        ("place", "32", "32"),
    ],
)  # fmt: skip
def test_a_text_is_read_as_the_option_s_type(name: str, text: str, value: object) -> None:
    assert getattr(get_task(HERE, {name: text}).options, name) == value


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sice": "3"}, "task .* has no option 'sice'; did you mean 'size'\\? Its options:\n  size=4  Cells on each "
                        "side of the board. \\(from 2 to 6\\)\n  form=xml  How a move is written. \\(xml, tool\\)\n"),
        ({"zzz": 1}, "has no option 'zzz'\\. Its options:"),
        ({"size": "9"}, "option `size` must be less than or equal to 6, got '9'\n  size=4  Cells .* \\(from 2 to 6\\)$"),
        ({"size": "wide"}, "option `size` must be a valid integer.*got 'wide'\n  size=4"),
        ({"form": "yaml"}, "option `form` must be 'xml' or 'tool', got 'yaml'"),
        ({"shows_history": "perhaps"}, "option `shows_history` must be a valid boolean[^$]*\\(true, false\\)"),
        ({"level": "4"}, "option `level` must be 1, 2 or 3, got '4'"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_an_error_that_says_what_is_allowed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        get_task(HERE, options)
    with pytest.raises(ConfigError, match=said):
        BoardTask(**options)


def test_a_task_without_options_takes_none() -> None:
    with pytest.raises(ConfigError, match="task 'yes_no_maybe' takes no options, got 'size'"):
        get_task("yes_no_maybe", {"size": 4})
    with pytest.raises(ConfigError, match="takes no options, got 'place'"):
        get_task(f"{__name__}:made", {"place": "there"})
    assert get_task(f"{__name__}:made") is made
    assert made.label == "board"


def test_the_label_names_options_that_differ_and_old_tasks_keep_their_names() -> None:
    assert get_task("tic_tac_toe").label == "tic_tac_toe"
    assert get_task("tic_tac_toe").scenarios("train", seed=3, count=1)[0].id == "tic_tac_toe/train/3/0"
    assert BoardTask().label == BoardTask(size=4).label == "board"
    task = BoardTask(size=3, chance=0.25, form="tool")
    assert task.label == "board-size-3-form-tool-chance-0.25"
    assert task.scenarios("val", seed=0, count=1)[0].id == "board-size-3-form-tool-chance-0.25/val/0/0"


def test_labels_are_safe_as_file_names_short_and_different() -> None:
    tasks = [BoardTask(place=place) for place in ("../a b", "/a b", "a/b", "a-b", "..", "x" * 300, "x" * 301)]
    labels = [validate_name(task.label, param="name") for task in tasks]
    assert len(set(labels)) == len(labels)
    assert max(map(len, labels)) <= 80
    assert labels[3] == "board-place-a-b"
    assert BoardTask(place="a/b").label == BoardTask(place="a/b").label


def test_tiny_options_lie_under_the_user_s_own() -> None:
    assert get_task(HERE).options == BoardOptions()
    assert get_task(HERE, is_tiny=True).label == "board-size-3-form-tool"
    assert get_task(HERE, {"size": "5"}, is_tiny=True).label == "board-size-5-form-tool"


def test_an_instance_keeps_the_options_that_it_was_made_with(registered: None) -> None:
    assert get_task("board") is get_task("board")
    assert get_task("board", {"size": 5}).label == "board-size-5-chance-0.5"
    assert get_task("board", is_tiny=True).label == "board-size-3-form-tool-chance-0.5"
    assert get_task("board").label == "board-chance-0.5"


# --- environments of other frameworks ---


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_tasks.openenv._load_client", lambda: object)
    fake = SimpleNamespace(resolve_env_config=lambda config: config, load_environment=lambda config: config)
    monkeypatch.setattr("art_tasks.verifiers._load_verifiers", lambda: fake)


def test_a_prefix_names_an_environment_of_another_framework(served: None) -> None:
    task: Any = get_task("openenv:http://127.0.0.1:8000/game", {"max_turns": "7"})
    assert (task._url, task._max_turns, task._max_sessions) == ("http://127.0.0.1:8000/game", 7, 8)
    assert re.fullmatch(r"openenv-127\.0\.0\.1-8000-game-[0-9a-f]{8}-max_turns-7", task.label)
    assert task.scenarios("train", seed=0, count=1)[0].id.startswith(f"{task.label}/train/")
    task = get_task("verifiers:my-env-v1", {"max_tokens": "64"})
    assert task._env == {"taskset": {"id": "my-env-v1"}}
    assert (task._sampling, task.label) == ({"temperature": 1.0, "max_tokens": 64}, "verifiers-my-env-v1-max_tokens-64")


def test_a_task_made_in_python_keeps_its_plain_name(served: None) -> None:
    assert OpenEnvTask("http://127.0.0.1:8000", max_turns=3).label == "openenv"
    assert VerifiersTask("my-env-v1").scenario("train", 0, 1, {}).id == "verifiers/train/0/1"


def test_what_is_wrong_with_a_prefix_is_said(served: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^task 'openenv:': write openenv:URL, an environment that OpenEnv serves$"):
        get_task("openenv:")
    with pytest.raises(
        ConfigError, match=r"task 'openenv:http://x': task 'openenv' has no option 'turns'; did you mean"
    ):
        get_task("openenv:http://x", {"turns": 3})
    with pytest.raises(ConfigError, match=r"^task 'harbor:nowhere': nowhere is no task directory of Harbor"):
        get_task("harbor:nowhere")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "harbor.py").write_text("from tests.support.board_task import BoardTask\n")
    assert isinstance(get_task("./harbor.py:BoardTask"), BoardTask)
