"""`--help` of every command: its width, its voice, its groups; and what a shell completes."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from art.cli.main import GROUPS, SHELLS, build_parser, main
from tools.pages.cli import parsers

PARSERS = {parser.prog: parser for parser, _ in parsers()}


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Options and arguments, and the actions of a command."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action._get_subactions()
        elif not isinstance(action, argparse._HelpAction):
            found.append(action)
    return found


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_help_is_as_wide_as_the_terminal_and_at_most_80_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, parser in (PARSERS | {"art": build_parser([])}).items():
        # An example that can be copied, or a word, is not broken.
        text = [line for line in parser.format_help().splitlines() if columns >= 80 or not line.startswith("    ")]
        assert [line for line in text if len(line) > min(columns, 80) and " " in line.strip()] == [], name


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_has_a_help_sentence_in_one_voice(name: str) -> None:
    description = PARSERS[name].description
    assert re.match(r"[A-Z][\w'-]*,? ", description or ""), "an imperative, without the call"
    for action in options(PARSERS[name]):
        text = action.help or ""
        told = f"{name} {'/'.join(action.option_strings) or action.dest}: {text!r}"
        assert len(text.split()) >= 3, told
        assert text[0].islower() or text[:2].isupper() or text[0] in "0`", f"{told} begins with a capital letter"
        assert not text.endswith("."), told
        assert not re.match(r"(of|by|for|from|that|to|in) ", text), f"{told} lacks its noun"


def test_commands_are_in_groups() -> None:
    text = build_parser([]).format_help()
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(set(grouped)) == len(grouped)
    assert all(re.search(rf"^  {name} +\w", text, re.MULTILINE) for name in grouped)
    assert [line[:-1] for line in text.splitlines() if line.endswith(":")][1:] == [*GROUPS, "other commands"]
    assert text.count("  completion ") == 1


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_ARGCOMPLETE" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("art tra", ["train"]),
        ("art train --held", ["--held-out"]),
        ("art train tic_t", ["tic_tac_toe"]),
        ("art doctor m --task temp", ["temporal_clue"]),
        ("art demo --engine ", ["torch", "vllm"]),
        ("art checkpoints export p/m m", ["merged"]),
    ],
)
def test_bash_completes(typed: str, completed: list[str], tmp_path: Path) -> None:
    program = tmp_path / "art"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m art.cli.main "$@"\n')
    program.chmod(0o755)
    words = typed.split(" ")
    script = (
        f'eval "$(art completion bash)"; COMP_WORDS=({" ".join(words[:-1])} "{words[-1]}"); '
        f'COMP_CWORD={len(words) - 1}; COMP_LINE="{typed}"; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9; '
        '_python_argcomplete art "" "" > /dev/null; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env)
    assert sorted(word.strip() for word in done.stdout.split("\n") if word) == completed, done.stderr
