"""The modules of the page as one classic script: it parses, runs as the modules do, and refuses what it cannot join."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from art.errors import ConfigError
from art.viewer.export import bundle
from art.viewer.page_files import page_files

node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script")
MODULES = {
    "main.js": b'/** Starts. */\nimport { h as make, TAG } from "./lib/dom.js";\nimport { view } from "./views/one.js";\n'
    b"const name = 1;\nconsole.log(make(TAG), view.title(), name);\n",
    "lib/dom.js": b'const name = "hidden";\nexport const TAG = "a";\nexport function h(tag) {\n  return tag + name;\n}\n'
    b"export async function later() {}\nexport class Box {}\n",
    "views/one.js": b'import { h, TAG } from "../lib/dom.js";\nconst name = 2;\nexport const view = { title: () => h(TAG) + name };\n',
    "unused.js": b"export default 3;\n",
}


def run(script: str, tmp_path: Path, *options: str) -> str:
    path = tmp_path / "page.js"
    path.write_text(script)
    done = subprocess.run(["node", *options, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@node
def test_modules_with_equal_names_and_renamed_imports(tmp_path: Path) -> None:
    assert run(bundle(MODULES), tmp_path) == "ahidden ahidden2 1\n"
    assert "unused" not in bundle(MODULES)


@node
def test_the_page_itself_can_be_joined_and_parses(tmp_path: Path) -> None:
    script = bundle(page_files().content)
    assert len(script) > 50_000
    run(script, tmp_path, "--check")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'import { x } from "./none.js";', "no file of the page"),
        (b'import { x } from "../../etc/passwd";', "no file of the page"),
        (b'import { x } from "https://evil.example/x.js";', "no file of the page"),
        (b'import { nothing } from "./lib/dom.js";', "does not export it"),
        (b'import * as dom from "./lib/dom.js";', "cannot be joined"),
        (b'import dom from "./lib/dom.js";', "cannot be joined"),
        (b"export default 1;", "cannot be joined"),
        (b"export let changing = 1;", "cannot be joined"),
        (b'import { a } from "./main.js";\nexport const b = 1;', "circle"),
    ],
)
def test_what_cannot_be_joined_is_said(text: bytes, problem: str) -> None:
    entry = (
        b'import { b } from "./bad.js";\nexport const a = 1;\n'
        if b"main.js" in text
        else b'import { } from "./bad.js";\n'
    )
    with pytest.raises(ConfigError, match=problem):
        bundle(MODULES | {"main.js": entry, "bad.js": text + b"\n"})
