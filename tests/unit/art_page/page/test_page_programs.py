"""The page's pure parts do what they should, and its modules have no type errors. Both need programs that not every machine has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import art_page

STATIC = Path(art_page.__file__).parent / "static"
TESTS = Path(__file__).parent / "js"
REPOSITORY = Path(__file__).parents[4]
TYPESCRIPT = REPOSITORY / "tools" / "page" / "node_modules" / ".bin" / "tsc"


def test_pure_parts_pass_their_tests_in_node(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    shutil.copytree(STATIC, tmp_path / "static", ignore=shutil.ignore_patterns("vendor"))
    shutil.copytree(TESTS, tmp_path / "tests")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    files = sorted(str(path) for path in (tmp_path / "tests").glob("*.test.js"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}
    done = subprocess.run(
        [node, "--test", *files], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\S* ?pass [1-9]\d+$", done.stdout, re.MULTILINE), done.stdout


def test_modules_have_no_type_errors() -> None:
    if not TYPESCRIPT.exists():
        pytest.skip("TypeScript is not installed; `make lint` does it")
    done = subprocess.run([TYPESCRIPT, "-p", "tools/page"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
