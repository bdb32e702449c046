"""The architecture as a test: which part may import which. The table is that of docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "art"

ANYTHING = None
ALLOWED: dict[str, set[str] | None] = {
    "errors": set(),
    "config": {"errors"},
    "protocol": {"config", "errors"},
    "messages": set(),
    "observations": set(),
    "trajectory": {"messages", "protocol", "errors"},
    "capture": {"messages", "trajectory", "errors"},
    "client": {"protocol", "config", "utils", "errors"},
    "costs": {"storage", "errors"},
    "faults": {"trajectory", "errors"},
    "gather": {"messages", "trajectory", "arguments", "faults", "errors"},
    "batches": {"gather", "faults", "trajectory", "errors"},
    "compat": {"config", "costs", "errors"},
    "dev": {"compat", "config", "errors"},
    "utils": {"compat", "config", "trajectory", "storage", "errors"},
    "rollouts": {"trajectory", "client", "protocol", "errors"},
    "arguments": {"trajectory", "errors"},
    "submission": {"arguments", "messages", "trajectory", "protocol", "errors"},
    "backend_checkpoints": {"client", "protocol", "errors"},
    "interrupt": set(),
    "backend": {
        "backend_checkpoints",
        "arguments",
        "submission",
        "trajectory",
        "protocol",
        "client",
        "rollouts",
        "config",
        "dev",
        "interrupt",
        "errors",
    },
    "model": {
        "trajectory",
        "arguments",
        "capture",
        "compat",
        "backend",
        "rollouts",
        "protocol",
        "config",
        "costs",
        "dev",
        "storage",
        "utils",
        "errors",
    },
    "rewards": {"messages", "trajectory", "faults", "model", "costs", "errors"},
    "scenarios": {"model", "rewards", "storage", "errors"},
    "mcp": {"task", "messages", "trajectory", "model", "rewards", "scenarios", "protocol", "errors"},
    "report": {"storage"},
    "engine": {"protocol", "errors"},
    "quantization": {"config", "errors"},
    "engines": {"engine", "quantization", "protocol", "config", "errors"},
    "storage": {"trajectory", "protocol", "errors"},
    "gateway": {"engine", "storage", "protocol", "config", "errors"},
    "trainer": {"trajectory", "storage", "quantization", "config", "errors"},
    "exports": {"storage", "protocol", "errors"},
    "runtime": {
        "exports",
        "gateway",
        "engine",
        "engines",
        "trainer",
        "storage",
        "observations",
        "trajectory",
        "protocol",
        "config",
        "errors",
    },
    "server": {"runtime", "gateway", "storage", "protocol", "config", "errors"},
    "backends": {"backend", "client", "config", "protocol", "storage", "errors"},
    "integrations": {"capture", "model", "task", "trajectory", "utils", "errors"},
    "langgraph": {"integrations"},
    "local": {"backends"},
    "metrics": {"compat"},
    "serverless": {"compat"},
    "skypilot": {"compat"},
    "trajectories": {"messages", "trajectory"},
    "types": {"messages", "config", "backend"},
    "task": {"messages", "trajectory", "model", "gather", "utils", "storage", "errors"},
    "comparison": {"faults", "task", "rewards", "gather", "model", "trajectory"},
    "training_loop": {"faults", "task", "rewards", "gather", "model", "trajectory", "config", "errors"},
    "tasks": {"task", "trajectory", "model", "gather", "scenarios", "errors"},
    "cli": ANYTHING,
    "testing": ANYTHING,
}
NOBODY_IMPORTS = {"cli", "testing"}
"""Entry points: only `cli` and `testing` themselves may import these."""


def parts() -> list[str]:
    return sorted(
        {path.stem if path.is_file() else path.name for path in SRC.iterdir() if not path.name.startswith("_")}
    )


def imported_parts(path: Path) -> set[tuple[str, int]]:
    """`(part, line)` of every import of ours in a file, those inside functions and `TYPE_CHECKING` blocks too."""
    found: set[tuple[str, int]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(name.name.split(".")[1], node.lineno) for name in node.names if name.name.startswith("art.")}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "art":
            words = node.module.split(".")
            names = [words[1]] if len(words) > 1 else [name.name for name in node.names]
            found |= {(name, node.lineno) for name in names}
    return found


@pytest.mark.parametrize("part", parts())
def test_part_imports_only_what_it_may(part: str) -> None:
    assert part in ALLOWED, f"src/art/{part} is new: give it a row here and in docs/architecture.md"
    allowed = ALLOWED[part]
    root = SRC / part
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    wrong = []
    for path in files:
        for other, line in sorted(imported_parts(path)):
            private_entry = other in NOBODY_IMPORTS and part not in NOBODY_IMPORTS
            if other != part and (private_entry or (allowed is not None and other not in allowed)):
                wrong.append(f"{path.relative_to(SRC)}:{line} imports art.{other}")
    assert not wrong, "\n".join(wrong)


def test_older_names_use_nothing_of_the_entry_points() -> None:
    wrong = [
        f"{path.name}:{line} imports art.{other}"
        for path in sorted((SRC.parent / "openpipe_art").glob("*.py"))
        for other, line in sorted(imported_parts(path))
        if other in NOBODY_IMPORTS
    ]
    assert not wrong, "\n".join(wrong)


def test_table_has_no_row_for_a_part_that_is_gone() -> None:
    assert set(ALLOWED) <= set(parts())


def test_the_table_itself_catches_a_wrong_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from art.engines.torch import engine\n    import art.trainer.trainer\n")
    assert {name for name, _ in imported_parts(bad)} == {"engines", "trainer"}
