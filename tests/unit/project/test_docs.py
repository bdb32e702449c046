"""What the documentation says exists, exists: commands, files, links, and the quick start as it is printed."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from openai.types.chat.chat_completion import Choice

import art
from art.client.submission import wire_trajectory
from art.config import TrainConfig
from art.config.training import ALGORITHMS
from tests.support.fake_art_server import FakeArtServer

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "AGENTS.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "benchmarks/README.md",
        ROOT / "benchmarks/results/README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "skills").rglob("*.md"),
    ]
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # A command ends at two spaces, a comment, a closing backtick or the end of its line.
    commands = re.findall(r"(?:^ {4}|`)make ([a-z -]+?)(?=  |\s*#|`|$)", page.read_text(), re.MULTILINE)
    assert {word for command in commands for word in command.split()} <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_of_the_source_tree_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_texts_stay_short() -> None:
    """What a newcomer reads first, and what everybody reads before an upgrade."""
    assert len((ROOT / "README.md").read_text().split()) <= 700
    assert len((ROOT / "CHANGELOG.md").read_text().split()) < 3000


def test_the_script_of_the_readme_is_the_example() -> None:
    example = (ROOT / "examples/quickstart/quickstart.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example.split('"""\n', 1)[1].strip() in (block.strip() for block in blocks)


@pytest.mark.parametrize("command", ["demo", "train", "new", "tiny-model"])
def test_commands_of_the_readme_have_help(command: str) -> None:
    assert f"art {command}" in (ROOT / "README.md").read_text()
    done = subprocess.run([sys.executable, "-m", "art.cli.main", command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: art" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_use_names_that_exist(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        tree = compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "art":
                assert hasattr(art, node.attr), f"{page.name}: art.{node.attr}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "model":
                assert hasattr(art.TrainableModel, node.attr) or node.attr in art.TrainableModel.model_fields


# -- the guide's section on losses --

LOSSES = (ROOT / "docs/guide.md").read_text().split("\n## Choosing what is learnt\n")[1].split("\n## ")[0]


def table(first_column: str) -> dict[str, str]:
    """The rows of a table of that section: first column to the rest."""
    rows = LOSSES.split(f"| {first_column} |")[1].split("\n\n")[0].splitlines()[2:]
    return {name: rest for row in rows for name, rest in re.findall(r"^\| (.*?) \| (.*) \|$", row)}


def test_the_guide_knows_every_preset_and_loss() -> None:
    presets = {name.strip("`") for name in table("preset")} - {"default"}
    assert presets == ALGORITHMS.keys() - {"dppo", "ppo", "cispo", "reinforce", "sft", "dpo"}
    assert all(f"`{name}`" in LOSSES for name in ALGORITHMS)


@pytest.mark.parametrize("field", ["baseline", "scale_rewards", "anchor"])
def test_the_guide_knows_every_value_of_a_setting(field: str) -> None:
    values = re.findall(r'"(\w+)"', table("setting")[f"`{field}`"])
    assert sorted(values) == sorted(get_args(TrainConfig.model_fields[field].annotation))


async def test_the_examples_of_losses_run() -> None:
    message = {"role": "assistant", "content": "yes"}
    logprobs = {"content": [{"token": "yes", "logprob": -1.0, "top_logprobs": []}]}
    choice = Choice.model_validate({"finish_reason": "stop", "index": 0, "message": message, "logprobs": logprobs})
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": "a"}, choice, choice])
    server, backend = FakeArtServer(), art.Backend("http://art.test", "key")
    backend._client = server.client()
    model = art.TrainableModel(name="agent", project="docs", base_model="base")
    await backend.register(model)
    names: dict[str, Any] = {"art": art, "backend": backend, "model": model, "trajectory": trajectory}
    names |= {"groups": [art.TrajectoryGroup([trajectory])], "choices": [choice, choice]}
    for block in re.findall(r"```python\n(.*?)```", LOSSES, re.DOTALL):
        done = eval(compile(block, "guide.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(done):
            await done
    sent = [TrainConfig.model_validate(body["config"]) for _, path, body in server.requests if path.endswith("/train")]
    assert sent == [
        TrainConfig(loss="grpo"),
        TrainConfig(loss="dapo", learning_rate=2e-5),
        TrainConfig(loss=names["loss"]),
    ]
    assert wire_trajectory(trajectory, "trajectory").token_rewards == [[0.0], [0.0]]
