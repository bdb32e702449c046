"""Each block of code in the documentation has a syntax, names, files and options that exist.

`tests/e2e/test_docs_run.py` runs those that are not marked as `not run`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.docs_blocks import PAGES, ROOT, Block, all_blocks, blocks_of, commands_of, parser_for

BLOCKS = all_blocks()
LANGUAGES = {"python", "shell", "text", "toml", "yaml"}
OTHER_PROGRAMS = {
    "cd", "claude", "curl", "cut", "docker", "echo", "chmod", "export", "kubectl", "ls", "make", "openssl", "pip", "podman", "printf", "python", "ray", "sh", "sky", "srun", "ssh",
    "tensorboard", "torchrun", "touch", "trackio", "uv", "uvx", "vllm", "wandb",
}  # fmt: skip
"""What a shell block may start besides our own programs. A new word here is a decision: most often it is a typo, or a
drawing that wants to be marked."""
SHELL = [block for block in BLOCKS if block.language == "shell"]
DRAWINGS = ("a drawing", "a list of")
COMMANDS = [block for block in SHELL if not block.not_run.startswith(DRAWINGS) and "two lines of" not in block.not_run]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert len(BLOCKS) > 60


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.not_run], ids=lambda block: block.id)
def test_a_reason_names_files_that_exist(block: Block) -> None:
    named = re.findall(r"(?:tests|docs|examples|benchmarks)/[\w./-]+\w", block.not_run)
    assert not [name for name in named if not (ROOT / name).exists()]
    assert len(block.not_run.split()) >= 2, "say why"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=lambda block: block.id)
def test_python_has_a_syntax(block: Block) -> None:
    tree = compile(block.text, block.id, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("art", "openpipe_art"):
            module = __import__(str(node.module), fromlist=["*"])
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("toml", "yaml")], ids=lambda block: block.id)
def test_settings_have_a_syntax(block: Block) -> None:
    assert (tomllib.loads if block.language == "toml" else yaml.safe_load)(block.text)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.id)
def test_commands_and_their_options_exist(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    commands = list(commands_of(block.text))
    assert commands
    for program, *arguments in commands:
        if program in OTHER_PROGRAMS:
            _check_other(program, arguments, (ROOT / block.page).parent)
            continue
        parser = parser_for(program, arguments)
        assert parser is not None, f"{program}: mark what is no shell as `<!-- not run: a drawing -->`"
        try:
            parser.parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{program} {' '.join(arguments)}: {capsys.readouterr().err}")


def _check_other(program: str, arguments: list[str], folder: Path) -> None:
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for named in arguments[1:]:
            if named == "-e":  # of the clone, `.[local]`
                continue
            name, _, wanted = named.partition("[")
            assert name in ("agent-reinforcement-trainer", ".", "./agent_reinforcement_trainer-*.whl")
            assert set(filter(None, wanted.rstrip("]").split(","))) <= set(extras)
    elif program in ("python", "sh") and arguments[0] != "-m":
        names = [folder / arguments[0], *ROOT.glob(f"examples/*/{arguments[0]}")]
        assert any(path.exists() for path in names), f"there is no {arguments[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_inside_sentences_exist(page: Path) -> None:
    for text in re.findall(r"`(art [a-z][^`]*)`", page.read_text()):
        words = text.split()[1:]
        parser = parser_for("art", words)
        assert parser is not None
        commands = next(action for action in parser._actions if action.dest == "command")
        assert words[0] in commands.choices, text
        chosen = commands.choices[words[0]]
        actions = [chosen, *(p for a in chosen._actions if isinstance(a.choices, dict) for p in a.choices.values())]
        known = {option for each in actions for option in each._option_string_actions}
        assert {re.split(r"[=,|]", word)[0] for word in words if word.startswith("--")} <= known, text


def test_blocks_are_found_with_their_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.docs_blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "text\n    no block, for no empty line is before it\n\n<!-- not run: needs a GPU -->\n\n    art a \\\n        --b\n\n"
        "    art c\n\n<!-- needs: mcp -->\n\n```python\nx = 1\n\n    y\n```\n\n<!-- not run: of no block -->\nword\n\n"
        "    X=1 art d $(art e) && art f # g\n"
    )
    first, second, third = blocks_of(page)
    assert (first.language, first.text, first.not_run, first.line) == (
        "shell", "art a \\\n    --b\n\nart c\n", "needs a GPU", 6
    )  # fmt: skip
    assert (second.language, second.text, second.needs, second.not_run) == ("python", "x = 1\n\n    y\n", "mcp", "")
    assert third.not_run == ""
    assert list(commands_of(first.text)) == [["art", "a", "--b"], ["art", "c"]]
    assert list(commands_of(third.text)) == [["art", "e"], ["art", "d", "SUBSTITUTED"], ["art", "f"]]
