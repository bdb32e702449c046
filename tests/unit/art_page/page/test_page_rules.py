"""The page's files keep the rules that its security policy and its readers rely on."""

from __future__ import annotations

import hashlib
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import art_page

STATIC = Path(art_page.__file__).parent / "static"
MODULES = sorted(path for path in STATIC.rglob("*.js") if path.parent.name != "vendor")
NAMES = [path.relative_to(STATIC).as_posix() for path in MODULES]
STYLES = sorted(path for path in STATIC.rglob("*.css") if path.parent.name != "vendor")
MAX_WHEEL_BYTES = 300_000
"""Size of the page's files in a wheel, which is a zip file and compresses each of them."""
VENDORED = {
    # From `npm pack uplot@1.6.32`, folder dist/; MIT, see uPlot.LICENSE. https://github.com/leeoniya/uPlot
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
UPLOT_VERSION = "1.6.32"

IMPORT = re.compile(r'^import \{ [A-Za-z_$][\w$]*(?:, [A-Za-z_$][\w$]*)* \} from "(\.{1,2}/[\w/.-]+\.js)";$')
FORBIDDEN = re.compile(
    r"\binnerHTML\b|\bouterHTML\b|\binsertAdjacentHTML\b|\bcreateContextualFragment\b|\bdocument\.write|\beval\s*\("
    r"|\bnew Function\b|\bsrcdoc\b|\bDOMParser\b|\bsetHTML|javascript:"
    r"|setAttribute\(\s*[\"'](?:style|on\w+)[\"']|\bstyle\.cssText\b|\bimport\s*\(|^export default|^export \{|^export \*"
    r"|https?://(?!www\.w3\.org/2000/svg)",
    re.MULTILINE,
)


def strip_comments(text: str) -> str:
    """Remove block comments and lines that are comments. Strings of the page hold no `/*`."""
    return re.sub(r"^\s*//.*$", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL), flags=re.MULTILINE)


def read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def test_modules_use_nothing_that_reads_text_as_code() -> None:
    found = {name: match[0] for name in NAMES if (match := FORBIDDEN.search(strip_comments(read(name))))}
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "node.innerHTML = text",
        'node.setAttribute("style", text)',
        'x = await import("./a.js")',
        "export default 3",
        'fetch("https://example.com")',
        "eval (text)",
    ],
)
def test_rule_finds_what_it_forbids(text: str) -> None:
    assert FORBIDDEN.search(text)


def test_every_module_is_reached_from_main() -> None:
    reached, todo = set(), [STATIC / "main.js"]
    while todo:
        module = todo.pop().resolve()
        if module not in reached:
            reached.add(module)
            lines = strip_comments(module.read_text()).splitlines()
            todo += [module.parent / match[1] for match in map(IMPORT.match, lines) if match]
    assert set(MODULES) == reached


def test_page_is_small() -> None:
    assert sum(len(zlib.compress(path.read_bytes())) for path in STATIC.rglob("*") if path.is_file()) < MAX_WHEEL_BYTES


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.in_script = False
        self.script_text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.in_script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script:
            self.script_text += data


def test_index_has_no_inline_code_and_names_files_that_exist() -> None:
    parser = _Tags()
    parser.feed(read("index.html"))
    assert parser.script_text.strip() == ""
    files = []
    for tag, attributes in parser.tags:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], (tag, attributes)
        if tag in ("link", "script"):
            files.append(attributes.get("href") or attributes.get("src") or "")
    assert all((STATIC / file).is_file() for file in files)
    linked = {file for file in files if file.startswith("styles/")}
    assert linked == {path.relative_to(STATIC).as_posix() for path in STYLES}


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.name)
def test_styles_load_nothing(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"@import|url\(|expression\(", text)
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("name", VENDORED)
def test_vendored_file_is_the_published_one(name: str) -> None:
    assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == VENDORED[name]


def test_vendored_version_is_the_one_whose_types_are_checked() -> None:
    assert f"(v{UPLOT_VERSION})" in read("vendor/uPlot.iife.min.js")[:100]
    tool = Path(__file__).parents[4] / "tools" / "page" / "package.json"
    assert f'"uplot": "{UPLOT_VERSION}"' in tool.read_text()
    assert {path.name for path in (STATIC / "vendor").iterdir()} == set(VENDORED)
