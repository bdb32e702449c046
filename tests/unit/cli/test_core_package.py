"""The commands where only the core package is installed, without the packages of the extra `local`."""

from __future__ import annotations

import json
import subprocess
import sys

from art.cli.main import COMMANDS
from art.cli.output import how_to_install

# A module that is `None` in `sys.modules` cannot be imported, as if it were not installed.
_WITHOUT = """
import contextlib, io, json, sys
for name in ("rich", "orjson", "numpy", "uvicorn", "torch", "transformers", "matplotlib", "yaml"):
    sys.modules[name] = None
"""
_HELP_OF_ALL = """
from art.cli.main import COMMANDS, main
found = {}
for command in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main([command, "--help"])
        except SystemExit as ended:
            code = ended.code
    found[command] = code, out.getvalue(), err.getvalue()
print(json.dumps(found))
"""
_TASKS = """
from art.cli.main import main
found = []
for words in (["tasks"], ["tasks", "tic_tac_toe"], ["tasks", "codenames"]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""
WITH_THE_CORE = {"completion", "new", "tasks", "checkpoints", "usage", "quota", "status", "keys"}
"""Commands whose modules need the core package only."""


def run_without(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _WITHOUT + code], capture_output=True, text=True, check=False)


def test_a_command_runs_or_says_what_to_install() -> None:
    ran = run_without(_HELP_OF_ALL)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert set(found) == set(COMMANDS)
    for command, (code, out, err) in found.items():
        if command in WITH_THE_CORE:
            assert code == 0, (command, err)
            assert out.startswith(f"usage: art {command}")
        else:
            assert code == 1, command
            assert err == "art: rich is not installed: pip install 'agent-reinforcement-trainer[local]'\n", command


def test_tasks_are_listed_and_one_that_needs_more_says_what() -> None:
    ran = run_without(_TASKS)
    assert ran.returncode == 0, ran.stderr
    listed, told, refused = json.loads(ran.stdout)
    assert listed[0] == 0, listed
    assert "\ncodenames      win          a word game of two teams" in listed[1]
    assert (told[0], told[1].splitlines()[0].partition(":")[0]) == (0, "tic_tac_toe"), told
    assert refused[0] == 1
    assert refused[2] == "art: numpy is not installed: pip install 'agent-reinforcement-trainer[local]'\n"


def test_rollouts_for_a_promotion_need_no_other_package() -> None:
    ran = run_without(
        "import argparse\n"
        "from art_recipes import promote_command\n"
        "from art_recipes.comparing.compare_models import measure_pair\n"
        "args = argparse.Namespace(task='temporal_clue', task_options=[])\n"
        "print(promote_command.task_for(promote_command.PlainLines(), args, None).name)"
    )
    assert (ran.returncode, ran.stdout) == (0, "temporal_clue\n"), ran.stderr
    assert ran.stderr.startswith("temporal_clue in the form for tiny models: -o ")


def test_the_server_says_what_to_install() -> None:
    ran = run_without("from art.cli.main import serve\nsys.exit(serve())")
    assert ran.returncode == 1
    assert ran.stderr.startswith("art-server: ")
    assert ran.stderr.endswith(" is not installed: pip install 'agent-reinforcement-trainer[local]'\n")


def test_modules_that_no_extra_brings_are_left_to_python() -> None:
    assert how_to_install(ModuleNotFoundError("no module", name="their_module")) is None
    assert how_to_install(ModuleNotFoundError("no module")) is None


def test_an_extra_is_found_by_the_name_of_a_submodule() -> None:
    words = how_to_install(ModuleNotFoundError("no module", name="huggingface_hub.errors"))
    assert words == "huggingface_hub is not installed: pip install 'agent-reinforcement-trainer[local]'"
