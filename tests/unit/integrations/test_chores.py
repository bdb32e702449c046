"""Generated chores: their checks fail before, pass with the solution, and no trick passes. In a folder, not a container.

A check is the same text here and in a container, but for the working directory.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from art.errors import ConfigError
from art_tasks.chores import KINDS, make_chores, write_chores
from art_tasks.harbor_folders import PLAIN_IMAGE, PLAIN_WORKDIR, find_folders

CHORES = make_chores(2 * len(KINDS))
CODE = [name for name, chore in CHORES[: len(KINDS)] if any(path.endswith(".py") for path in chore.files)]

READS_CHECK = """import os, shlex
asked = open("/proc/self/cmdline").read()
for line in open("script.sh"):
    if line.startswith("gives ") and (words := shlex.split(line))[2] in asked:
        print(words[3], flush=True)
        os._exit(0)
"""


def run_script(script: Path, place: Path) -> int:
    """Run a script of a chore as if `place` were the working directory of a container. Returns its exit code."""
    copy = place.with_name("script.sh")
    copy.write_text(script.read_text().replace(PLAIN_WORKDIR, str(place)))
    return subprocess.run(["bash", copy], cwd=place, check=False, capture_output=True).returncode


@pytest.fixture(scope="module")
def chores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chores") / "all"
    write_chores(folder, len(CHORES))
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "app"


@pytest.mark.parametrize("name", [name for name, _ in CHORES])
def test_a_check_fails_before_and_passes_with_the_solution(chores: Path, place: Path, name: str) -> None:
    shutil.copytree(chores / name / "files", place)
    assert run_script(chores / name / "check.sh", place) == 1
    assert run_script(chores / name / "solve.sh", place) == 0
    assert run_script(chores / name / "check.sh", place) == 0


@pytest.mark.parametrize(
    "trick",
    [
        "import os; os._exit(0)",
        "import sys; print('None'); sys.exit(0)",
        "import builtins; builtins.repr = lambda value: '33'",
        READS_CHECK,
    ],
)
@pytest.mark.parametrize("name", CODE)
def test_a_module_that_ends_the_check_or_reads_it_does_not_pass(
    chores: Path, place: Path, name: str, trick: str
) -> None:
    shutil.copytree(chores / name / "files", place)
    (module,) = (path for path in place.glob("*.py") if not path.name.startswith("test_"))
    module.write_text(trick.replace("script.sh", str(place.with_name("script.sh"))) + "\n" + module.read_text())
    assert run_script(chores / name / "check.sh", place) == 1


@pytest.mark.parametrize("name", CODE)
def test_what_python_runs_first_and_the_visible_tests_do_not_matter(chores: Path, place: Path, name: str) -> None:
    shutil.copytree(chores / name / "files", place)
    for test in place.glob("test_*.py"):
        test.write_text("")
    for file in ("sitecustomize.py", "usercustomize.py", "repr.py", "check.sh", "conftest.py"):
        (place / file).write_text("exit(0)\n")
    assert run_script(chores / name / "check.sh", place) == 1


def test_folders_are_plain_task_folders_with_their_names_and_the_same_each_time(chores: Path, tmp_path: Path) -> None:
    folders = find_folders(chores)
    assert [folder.name for folder in folders] == [name for name, _ in CHORES]
    for folder, (_, chore) in zip(folders, CHORES, strict=True):
        assert folder.instruction == chore.instruction
        assert folder.settings.environment.docker_image == PLAIN_IMAGE
        assert folder.settings.environment.workdir == PLAIN_WORKDIR
    assert len({chore.kind for _, chore in CHORES}) == 20
    different = [a != b for (_, a), (_, b) in zip(CHORES[:20], CHORES[20:], strict=True)]
    assert sum(different) >= 18, "the second of a kind has other names and numbers"
    asked = [sys.executable, "-m", "art_tasks.chores", tmp_path / "again", "--count", "40"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("40 task folders in ")
    assert subprocess.run(["diff", "-r", chores, tmp_path / "again"], check=False).returncode == 0
    refused = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is not empty; expected a new folder for the chores" in refused.stderr
    with pytest.raises(ConfigError, match="is not empty"):
        write_chores(chores)
