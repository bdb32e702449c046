"""What a laptop needs of ART works without what only Linux has. docs/platforms.md says what nobody has tried."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def as_on_windows(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-W",
        "ignore::EncodingWarning",
        "-X",
        "warn_default_encoding",
        "-m",
        "tests.support.windows",
    ]
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=120, cwd=folder or ROOT,
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "cp1252", "PATH": ""},
    )  # fmt: skip


def test_the_user_s_side_imports_without_what_windows_lacks() -> None:
    done = as_on_windows(str(ROOT / "tests/support/import_client_side.py"))
    assert done.returncode == 0, done.stderr[-2000:]
    count, _, failed = done.stdout.splitlines()[-1].partition(" modules, ")
    assert (int(count) > 150, failed) == (True, "0 failed"), done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-c", "import art; art.LocalBackend()"], "LocalBackend needs Linux or macOS, and this is Windows"),
        (["-c", "from art.cli.main import serve; exit(serve())"], "art-server needs Linux or macOS"),
    ],
)
def test_a_server_is_refused_on_windows(words: list[str], said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(words[1])
    done = as_on_windows(str(script))
    assert done.returncode == 1
    assert said in done.stderr
    assert "RemoteBackend" in done.stderr


def test_an_output_that_cannot_hold_a_character_gets_an_escape(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from art.cli.output import until_unread\nuntil_unread(lambda: print('\\u2192 \\u00fc') or 0)\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, check=True,
        env={"PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "cp1252"},
    )  # fmt: skip
    assert done.stdout.split() == [rb"\u2192", b"\xfc"]


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Lines that open a file as text, and leave its encoding to the operating system."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        if called in NOT_TEXT:
            continue
        if called.endswith((".read_text", ".write_text")):
            yield node.lineno
        elif called == "open" or name in ("open", "fdopen"):
            given = node.args[0 if "." in called and name == "open" else 1 :]
            modes = [*given, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
            mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else "" if modes else "r"
            if isinstance(mode, str) and mode and "b" not in mode:
                yield node.lineno


NOT_TEXT = {
    "Image.open", "Journal.open", "backend.open", "self._cluster.open", "self.door.open", "self._door.open", "importlib.metadata.distribution(PACKAGE).read_text", "os.open", "page.sessions.open",
    "self._backend.open", "self.tunnel.open", "tarfile.open", "tunnel.open", "webbrowser.open",
}  # fmt: skip


def test_text_files_have_an_encoding() -> None:
    """Otherwise Windows takes its code page: another one in each country, without most characters."""
    bad = "open(p)\np.open('w')\np.open()\np.read_text()\np.write_text('')\nopen(p, mode='a')\nos.fdopen(f, 'w')"
    assert list(without_encoding(ast.parse(bad))) == [1, 2, 3, 4, 5, 6, 7]
    good = "open(p, 'rb')\np.open('ab')\nos.open(p, flags)\np.read_text(encoding='utf-8')\np.open(mode)\nopen(p, m)"
    assert list(without_encoding(ast.parse(good))) == []
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line in without_encoding(ast.parse(path.read_text()))
    ]
    assert wrong == []
