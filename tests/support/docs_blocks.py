"""The code of the documentation: its blocks, and the commands in them, read as a user's shell would read them.

A block is a fence, or lines indented by four spaces after an empty line, which are shell. A fence of `text` is a
drawing or a listing, which nothing checks. A comment right before it
says what a test may not do with it, and never shows on the page:

    <!-- not run: needs a GPU -->       only its syntax, names and options are checked
    <!-- needs: langgraph -->           run where that can be imported
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from art.cli.main import build_parser
from art.cli.server import build_parser as build_server_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks/README.md",
        *(page for folder in ("docs", "examples", "skills") for page in (ROOT / folder).rglob("*.md")),
    ]
)
_MARKER = re.compile(r"<!-- (not run|needs): (.+) -->")
_FENCE = re.compile(r"```(\w*)$")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str = ""
    """Why no test runs it."""
    needs: str = ""
    """A module without which it is not run."""

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    lines, found, at, marker = path.read_text().split("\n"), [], 0, ("", "")
    while at < len(lines):
        first, language, body = at, "", []
        if fence := _FENCE.match(lines[at]):
            language, at = fence[1] or "unnamed", at + 1
            while not lines[at].startswith("```"):
                body.append(lines[at])
                at += 1
        elif lines[at].startswith("    ") and lines[at].strip() and (at == 0 or not lines[at - 1].strip()):
            language = "shell"
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                body.append(lines[at][4:])
                at += 1
        if language:
            kind, said = marker
            found.append(
                Block(
                    page=str(path.relative_to(ROOT)), line=first + 1, language=language,
                    text="\n".join(body).strip("\n") + "\n", not_run=said if kind == "not run" else "",
                    needs=said if kind == "needs" else "",
                )
            )  # fmt: skip
            marker = ("", "")
            at += language != "shell"
            continue
        if match := _MARKER.fullmatch(lines[at]):
            marker = (match[1], match[2])
        elif lines[at].strip():
            marker = ("", "")
        at += 1
    return found


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, those inside `$(...)` too, without variables set before them."""
    text = text.replace("\\\n", " ")
    for inner in re.findall(r"\$\(([^()]*)\)", text):
        yield from commands_of(inner)
    for line in re.sub(r"\$\([^()]*\)", "SUBSTITUTED", text).split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) & set("&|;") and not set(word) - set("&|;"):
                while words and _ASSIGNMENT.fullmatch(words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def parser_for(program: str, arguments: list[str]) -> argparse.ArgumentParser | None:
    """The parser of one of our programs; `None` for others."""
    if program == "art-server":
        return build_server_parser()
    if program == "art":
        return build_parser(arguments)
    return None


def module_is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
