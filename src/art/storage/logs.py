"""The log files of processes, how a process ended in words, and what a log line may hold: no secret, and no character
that a terminal or an editor acts on.

key art_3f9c01d2ab47_[redacted] came       everything that looks like a key is replaced, in tracebacks too
there is no model 'x\x1b[2J'               control characters are written as escapes
first line of a record                     further lines of a record are indented, so text from outside cannot
  its second line                          look like a record of its own
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from art.storage.atomic import storage_errors

HIDDEN = "[redacted]"
MIN_SECRET_LENGTH = 8
"""Shortest string that counts as a secret: shorter ones occur in ordinary words. A server that others can reach refuses
to start with a key that short."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SECRET_NAMES = (
    r"(?:[\w.-]*(?:api|access|secret|private|signing|encryption|account)[_-]?key(?:[_-]?id)?"
    r"|[\w.-]*(?:password|passwd|passphrase|secret|credentials?|signature)"
    r"|[\w.-]*(?:hf|hub|auth|access|refresh|session|security|id|csrf|github|gitlab|slack|bot)[_-]token)"
)
_PATTERNS = (
    # Keys of `art keys`: the id stays, so that one can tell which key it was.
    (re.compile(r"\b(art_[0-9a-f]{12}_)[A-Za-z0-9_-]{20,}"), rf"\1{HIDDEN}"),
    # Keys that a server makes for itself, and those of well-known services, which begin alike.
    (re.compile(r"\b(art-|sk-|sk_live_|rk_live_|hf_|glpat-|npm_|dckr_pat_|pypi-)[A-Za-z0-9_-]{20,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(gh[pousr]_|github_pat_|xox[abeprs]-|AIza|AKIA|ASIA)[A-Za-z0-9_-]{10,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), HIDDEN),  # JSON web tokens
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    # User and password in an address.
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s'\"@]+@"), rf"\1{HIDDEN}@"),
    # Headers, as headers, dictionaries or lists of pairs of bytes write them.
    (
        re.compile(
            r"(?i)\b((?:proxy-)?authorization['\"]?\s*[:=,]\s*(?:b?['\"])?(?:(?:bearer|basic|token)\s+)?)[^\s'\",)]+"
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(?i)\b(x-[a-z-]*(?:key|token|secret)['\"]?\s*[:=,]\s*(?:b?['\"])?)[^\s'\",)&]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b((?:set-)?cookie['\"]?\s*[:=,]\s*(?:b?['\"])?)[^'\"\n)]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{HIDDEN}"),
    # Settings, variables, parts of a query, fields of JSON, by the name of the value.
    (re.compile(rf"(?i)\b({_SECRET_NAMES}\\*['\"]?\s*[:=]\s*\\*['\"]?)[^\s'\",;&)}}\]\\]{{6,}}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)([?&](?:key|token|sig|auth|pass|pwd)=)[^\s'\"&]+"), rf"\1{HIDDEN}"),
)
_NAMED_SECRET = re.compile(r"(?i)(?:key(?:_id)?|token|secret|password|passwd|credentials?)$")
"""Names of environment variables that hold secrets."""
_SECRET_SETTING = re.compile(
    r"(?i).*(api|access|secret|private|account)[_-]?key(_?id)?|(.*[_-])?(key|token|secret|password|passwd|credentials?)"
)
_CONTROL = re.compile(
    # C0 but for tab and line feed, DEL and C1; line and paragraph separators; marks that turn the direction of text;
    # lone surrogates, which no file can hold.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_control(text: str) -> str:
    """Write every character that a terminal acts on as an escape. Tabs and line feeds stay."""

    def escape(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return _CONTROL.sub(escape, text)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace `secrets`, and everything that looks like one."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def clean(text: str, secrets: Iterable[str] = ()) -> str:
    return escape_control(redact(text, secrets))


def known_secrets(more: Iterable[str] = (), variables: Mapping[str, str] = os.environ) -> list[str]:
    """List the secrets of this process: `more`, and environment variables that are named like one.

    The longest comes first, because a secret may begin with another one.
    """
    named = (value for name, value in variables.items() if _NAMED_SECRET.search(name))
    return sorted({one for one in (*more, *named) if len(one) >= MIN_SECRET_LENGTH}, key=len, reverse=True)


def plain_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as plain JSON for a tracker, without those that look like secrets. Other objects become text."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=_as_plain))
    return {key: _without_secrets(key, value) for key, value in plain.items()}


def _as_plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return vars(value) if hasattr(value, "__dict__") and not callable(value) else str(value)


def _without_secrets(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(name, item) for item in value]
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else redact(value)
    return value


def is_secret(name: str) -> bool:
    """Whether a setting of this name is likely to be a key or a password."""
    return _SECRET_SETTING.fullmatch(name) is not None


class LogFormatter(logging.Formatter):
    """Formats a record as usual, and cleans it."""

    def __init__(self, fmt: str = FORMAT, secrets: Iterable[str] = ()) -> None:
        """
        Args:
            secrets: strings to replace wherever they occur, whatever they look like. Short ones are left out.
        """
        super().__init__(fmt)
        self._secrets = known_secrets(secrets, {})

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record), self._secrets).replace("\n", "\n  ")


class CleanStream:
    """A text stream that cleans what is written: by libraries that print, and by the interpreter when it ends."""

    def __init__(self, stream: TextIO, secrets: Iterable[str] = ()) -> None:
        self._stream = stream
        self._secrets = known_secrets(secrets, {})

    def write(self, text: str) -> int:
        self._stream.write(clean(text, self._secrets))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def log_to_stderr(level: int | str = logging.INFO, *, prefix: str = "", secrets: Iterable[str] = ()) -> None:
    """Log to standard error, and clean everything that this process writes there.

    Args:
        secrets: secrets beside those in the environment.
    """
    known = known_secrets(secrets)
    sys.stderr = CleanStream(sys.stderr, known)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(prefix + FORMAT, known))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)


MAX_LOG_BYTES = 32 * 2**20
"""A longer log is moved to `<name>.old`, which replaces the one there."""
TAIL_LINES = 15
_TAIL_BYTES = 16_384


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending, to be passed to a new process. A log over `MAX_LOG_BYTES` is moved away first. Raises
    `DiskFullError` or `StorageError` if the log cannot be opened."""
    with storage_errors(path, "opening"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.old"))
        return path.open("ab")


def rotate_log(path: Path) -> None:
    """Move a log over `MAX_LOG_BYTES` away while its process goes on writing. Call this from time to time.

    The process keeps its file descriptor, through which Python and C libraries write. So the content is copied, and the
    file is emptied. A line that is written in between may be lost.
    """
    with contextlib.suppress(OSError):  # a full disk or a missing log must not disturb the process
        if path.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(path, path.with_name(f"{path.name}.old"))
            os.truncate(path, 0)


def log_size(path: Path) -> int:
    """Size of a log in bytes; 0 if there is no log."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def log_since(path: Path, size: int) -> str:
    """Return the text that was written to a log after it had `size` bytes."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(min(size, log_size(path)))
        return clean(file.read().decode(errors="replace"))
    return ""


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log with a heading, to append to an error message; empty if there is no log."""
    tail = log_since(path, max(0, log_size(path) - _TAIL_BYTES)).strip().splitlines()[-lines:]
    return "\n  ".join([f"\nLast lines of {path}:", *tail]) if tail else ""


def describe_exit(returncode: int | None) -> str:
    """Say how a process ended, e.g. "exit status 1" or "signal 9, SIGKILL".

    Args:
        returncode: `Popen.returncode`: negative for a signal, `None` while the process runs.
    """
    if returncode is None or returncode >= 0:
        return "still running" if returncode is None else f"exit status {returncode}"
    names = {number.value: f", {number.name}" for number in signal.Signals}
    return f"signal {-returncode}{names.get(-returncode, '')}"
