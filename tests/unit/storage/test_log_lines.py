"""What a log line hides or escapes, and what it leaves."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from art.storage.logs import HIDDEN, CleanStream, LogFormatter, clean, escape_control, known_secrets, log_tail
from art_recipes.screen import Screen

OWN = "correct-horse-battery"
STORED = "art_3f9c01d2ab47_" + "aB3-_" * 8 + "xyz"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0B\n-----END RSA PRIVATE KEY-----"


def formatted(message: str, *args: object, exc_info: object = None) -> str:
    record = logging.LogRecord("x", logging.INFO, "f.py", 1, message, args, exc_info)  # type: ignore[arg-type]
    return LogFormatter("%(message)s", [OWN, "short", ""]).format(record)


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
        ("Proxy-Authorization: Basic dXNlcg==", "dXNlcg"),
        ("X-Api-Key: abcdef", "abcdef"),
        ("{'x-goog-api-key': 'abcdef'}", "abcdef"),
        ("X-Auth-Token=abcdef&x=1", "abcdef"),
        ("sent bearer abcdefgh.ijkl", "abcdefgh"),
        ("token hf_" + "a" * 30, "a" * 30),
        ("using sk-ant-api03-" + "a" * 30, "a" * 30),
        ("using ghp_" + "a" * 36, "a" * 36),
        ("using glpat-" + "a" * 20, "a" * 20),
        ("using xoxb-" + "1" * 20, "1" * 20),
        ("using AIza" + "b" * 35, "b" * 35),
        ("using AKIAIOSFODNN7EXAMPLE", "IOSFODNN7EXAMPLE"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "eyJzdWIiOiIxIn0"),
        ("cannot reach http://user:pass-word@host:1/v1", "pass-word"),
        ("cannot reach redis://:pass-word@host", "pass-word"),
        ("GET /v1?api_key=abcdef123&x=1", "abcdef123"),
        ("GET /v1?key=abcdef123", "abcdef123"),
        ("PUT https://s3/x?X-Amz-Signature=abcdef123&X-Amz-Date=1", "abcdef123"),
        ('{"api_key": "abcdef123"}', "abcdef123"),
        ('{"error": "{\\"password\\": \\"abcdef123\\"}"}', "abcdef123"),
        ("aws_secret_access_key = abcdef/123+4", "abcdef/123+4"),
        ("WANDB_API_KEY=abcdef123", "abcdef123"),
        ("access_token: abcdef123", "abcdef123"),
        ("Cookie: session=abcdef; other=ghijkl", "ghijkl"),
        (f"loaded {PEM}", "kqhkiG9w0B"),
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
        "max_tokens=100000 and stop_token_ids=[151645, 151643], token: 1234567",
        "published p/m@3: 28 layers, probe gap 1e-06 nats",
        "http://127.0.0.1:5000/v1 answers @ noon",
        "мир, 世界, شبكة, 👩‍👩‍👧, \tand tabs",
    ):
        assert formatted(line) == line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("over\rwritten\x08", "over\\x0dwritten\\x08"),
        ("c1 \x9b31m and \x85 and \x7f", "c1 \\x9b31m and \\x85 and \\x7f"),
        ("turned \u202eabc\u2066", "turned \\u202eabc\\u2066"),
        ("a\u2028b \ud800 \x00", "a\\u2028b \\ud800 \\x00"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert formatted(text) == formatted("%s", text) == escape_control(text) == shown
    assert escape_control(shown) == shown


def test_a_text_from_outside_cannot_look_like_a_record() -> None:
    line = formatted("there is no model %s", "x\n2026-01-01 00:00:00,000 INFO art.server: all is well")
    assert line.splitlines()[1].startswith("  2026")


def test_the_log_of_a_child_is_cleaned_whoever_writes() -> None:
    """A logger, a print of a library, a warning, and the traceback that ends the process."""
    code = (
        "import os, sys, logging, warnings\n"
        "from art.storage.logs import log_to_stderr\n"
        "log_to_stderr()\n"
        "bad = '\\x1b[2J ' + os.environ['SOME_API_KEY'] + ' http://u:hunter22@h'\n"
        "logging.getLogger('a').info('%s', bad); print(bad, file=sys.stderr); warnings.warn(bad)\n"
        "raise ValueError(bad)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={"SOME_API_KEY": OWN, "PYTHONPATH": sys.path[0]}
    )
    assert b"\x1b" not in ended.stderr
    assert ended.stderr.count(b"\\x1b[2J [redacted] http://[redacted]@h") == 4, ended.stderr
    assert OWN.encode() not in ended.stderr


def test_the_end_of_a_log_is_cleaned_when_it_is_quoted(tmp_path: Path) -> None:
    """vLLM and libraries in C write into it by themselves."""
    (tmp_path / "x.log").write_bytes(b"\x1b[31mERROR\x1b[0m token=1 hf_" + b"a" * 30)
    assert "\\x1b[31mERROR\\x1b[0m token=1 hf_[redacted]" in log_tail(tmp_path / "x.log")


def test_secrets_of_the_environment() -> None:
    variables = {
        "HF_TOKEN": "h" * 9,
        "AWS_ACCESS_KEY_ID": "k" * 20,
        "DB_PASSWORD": "p" * 8,
        "SHORT_KEY": "x",
        "A": "long enough",
    }
    assert known_secrets([OWN, ""], variables) == [OWN, "k" * 20, "h" * 9, "p" * 8]
    assert clean("a " + "h" * 9, known_secrets((), variables)) == f"a {HIDDEN}"


def test_a_clean_stream_is_a_stream() -> None:
    inside = io.StringIO()
    stream = CleanStream(inside, [OWN])
    assert stream.write(f"{OWN}\x1b\n") == len(OWN) + 2
    stream.writelines(["a\n", "b\x07\n"])
    stream.flush()
    assert inside.getvalue() == "[redacted]\\x1b\na\nb\\x07\n"


def test_the_console_shows_control_characters_and_keeps_its_colours() -> None:
    out = io.StringIO()
    console = Screen(file=out, force_terminal=True, width=80, color_system="standard")
    console.print("model said \x1b[2J and \u202eback", style="red", highlight=False)
    assert "\x1b[31mmodel said \\x1b[2J and \\u202eback" in out.getvalue()
