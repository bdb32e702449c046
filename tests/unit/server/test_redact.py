"""What a log line hides, and what it leaves."""

from __future__ import annotations

import logging
import sys

import pytest

from art.server.redact import HIDDEN, RedactingFormatter

OWN = "correct-horse-battery"
STORED = "art_3f9c01d2ab47_" + "aB3-_" * 8 + "xyz"


def formatted(message: str, *args: object, exc_info: object = None) -> str:
    record = logging.LogRecord("x", logging.INFO, "f.py", 1, message, args, exc_info)  # type: ignore[arg-type]
    return RedactingFormatter("%(message)s", [OWN, "short", ""]).format(record)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"key {OWN} came", OWN),
        (f"key {STORED} came", STORED[17:]),
        ("ART_API_KEY=art-" + "x" * 32, "x" * 32),
        ("Authorization: Bearer abc.def", "abc.def"),
        ("authorization=Basic dXNlcg==", "dXNlcg"),
        ("{'authorization': 'Bearer abcdef'}", "abcdef"),
        ("(b'authorization', b'Bearer abcdef')", "abcdef"),
        ("X-Api-Key: abcdef", "abcdef"),
        ("sent bearer abcdefgh.ijkl", "abcdefgh"),
        ("token hf_" + "a" * 30, "a" * 30),
    ],
)
def test_secrets_are_hidden(text: str, secret: str) -> None:
    for line in (formatted(text), formatted("%s", text), formatted("got %r", [text])):
        assert secret not in line
        assert HIDDEN in line


def test_tracebacks_too() -> None:
    try:
        raise ValueError(f"bad key {STORED} and {OWN}")
    except ValueError:
        line = formatted("it failed", exc_info=sys.exc_info())
    assert "ValueError: bad key art_3f9c01d2ab47_[redacted] and [redacted]" in line


def test_other_lines_stay() -> None:
    for line in (
        "job 3f9c01d2ab47 of games/art_agent runs",
        "the authorization of this step is a short word",
        "loading art-agent-7b from /models/sk-1",
        "the bearer of it",
    ):
        assert formatted(line) == line
