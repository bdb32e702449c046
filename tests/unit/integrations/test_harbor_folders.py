"""Task directories of Harbor: what is read, what is refused and how that is said, and which split a task is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from art.errors import ConfigError
from art.task.options import read_options
from art_tasks.harbor import HarborOptions, split_names
from art_tasks.harbor_folders import find_folders, read_folder

SAMPLE = Path(__file__).parents[3] / "examples" / "harbor_tasks"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 5\n',
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    return tmp_path / "task"


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def test_a_task_directory_is_read(folder: Path) -> None:
    write(
        folder, "task.toml",
        '[environment]\nmemory = "2G"\nstorage_mb = 100\ncpus = 2\nworkdir = "/x"\nbuild_timeout_sec = 9\n'
        "[environment.env]\nA = 1\n",
    )  # fmt: skip
    task = read_folder(folder)
    environment = task.settings.environment
    assert (task.instruction, environment.docker_image, environment.workdir) == ("Do it.", None, "/x")
    assert (environment.memory_mb, environment.storage_mb, environment.cpus) == (2048, 100, 2.0)
    assert (environment.env, environment.build_timeout_sec) == ({"A": "1"}, 9.0)
    assert task.settings.agent.timeout_sec == 600.0
    assert [task.name for task in find_folders(folder.parent)] == ["task"]
    write(folder, "task.toml", '[environment]\ndocker_image = "registry/x:1"\n')
    assert read_folder(folder).settings.environment.docker_image == "registry/x:1"


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        (
            "[environment]\nallow_internet = true",
            r"`environment\.allow_internet` must be False, got True.*without network.*Let Harbor run",
        ),
        ('[environment]\nnetwork_mode = "public"', r"`environment\.network_mode` must be 'no-network'"),
        ("[environment]\ngpus = 1", r"`environment\.gpus` must be 0, got 1"),
        ("[[environment.mcp_servers]]\nname = 'x'", r"`environment\.mcp_servers` is no setting"),
        ("[[steps]]\nname = 'x'", "`steps` is no setting"),
        ('[verifier]\nenvironment_mode = "separate"', r"`verifier\.environment_mode` must be 'shared'"),
        ('[agent]\nuser = "agent"', r"`agent\.user` must be 'root', '0' or 0"),
        ('[verifier]\nenv = {KEY = "${OPENAI_API_KEY}"}', "the user's environment is not given to tasks"),
        ("[agent]\ntimeout_sec = 0", r"`agent\.timeout_sec` must be greater than 0, got 0"),
        ("[environment]\nmemory = 'much'", 'a size must be like 2048 or "2G", got .much.'),
        ("verifier = 3", r"`verifier` .*dictionary.*, got 3"),
        ("[agent", "cannot be read"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(folder: Path, toml: str, said: str) -> None:
    write(folder, "task.toml", toml)
    with pytest.raises(ConfigError, match=said):
        read_folder(folder)


@pytest.mark.parametrize(
    "line",
    [
        "apt-get update",
        "apt-get -y install curl",
        "pip install pytest",
        "uvx pytest",
        "curl -LsSf https://x.org/i.sh | sh",
    ],
)
def test_tests_that_need_the_network_are_refused_with_their_line(folder: Path, line: str) -> None:
    write(folder, "tests/test.sh", f"#!/bin/bash\n# {line}\n{line}\n")
    with pytest.raises(ConfigError, match=r"test\.sh, line 3: .*\n.*takes something from the network"):
        read_folder(folder)


def test_tests_may_ask_their_own_server(folder: Path) -> None:
    write(folder, "tests/test.sh", "curl -s http://localhost:80/ http://127.0.0.1:8000\necho capital of pip\n")
    assert read_folder(folder).settings.verifier.env == {}


def test_what_is_missing_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no solution/solve\.sh, so it has no scripted player"):
        read_folder(folder).solution()
    write(folder, "environment/docker-compose.yaml", "")
    with pytest.raises(ConfigError, match="several containers"):
        read_folder(folder)
    (folder / "environment" / "docker-compose.yaml").unlink()
    (folder / "environment" / "Dockerfile").unlink()
    with pytest.raises(ConfigError, match=r"has no environment/Dockerfile, and its task\.toml names no"):
        read_folder(folder)
    (folder / "instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"has no instruction\.md"):
        read_folder(folder)
    with pytest.raises(ConfigError, match=r"is no task directory of Harbor, and contains none: there is no task\.toml"):
        find_folders(folder / "tests")
    with pytest.raises(ConfigError, match="is no task directory"):
        find_folders(folder / "nowhere")


def test_each_task_is_in_one_split_and_small_folders_have_all_three() -> None:
    for count in (1, 2, 3, 7, 29, 30, 400):
        names = [f"task-{index}" for index in range(count)]
        splits = split_names(reversed(names))
        assert sorted(name for split in splits.values() for name in split) == sorted(names)
        assert splits == split_names(names)
        assert splits["train"]
        assert bool(splits["test"]) == (count > 1)
        assert bool(splits["val"]) == (count > 2)
        assert len(splits["train"]) >= 0.6 * count or count < 4
    larger = split_names([f"task-{index}" for index in range(401)])
    assert all(set(split_names(names)[split]) <= set(larger[split]) for split in splits), "no task has moved"
    assert [len(split) for split in split_names(path.name for path in SAMPLE.iterdir()).values()] == [1, 1, 1]


@pytest.mark.parametrize("name", ["command_timeout", "output_chars", "max_completion_tokens"])
def test_an_option_that_a_coding_agent_decides_itself_is_refused(name: str) -> None:
    assert read_options("harbor", HarborOptions, {name: "500"})
    assert read_options("harbor", HarborOptions, {"agent": "codex", "max_turns": "5"})
    with pytest.raises(ConfigError, match=f"`{name}` has no effect on `agent` 'codex'"):
        read_options("harbor", HarborOptions, {"agent": "codex", name: "500"})
