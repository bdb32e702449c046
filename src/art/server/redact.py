"""Keep secrets out of logs: everything that looks like a key is replaced in every line, tracebacks included."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

HIDDEN = "[redacted]"
MIN_SECRET_LENGTH = 8
"""Shorter secrets stay in logs, because they occur in ordinary words. A server that other machines can reach refuses
to start with a shorter key."""
_PATTERNS = (
    # Keys of `art keys`: the id stays, so that one can tell which key it was.
    (re.compile(r"\b(art_[0-9a-f]{12}_)[A-Za-z0-9_-]{20,}"), rf"\1{HIDDEN}"),
    # Keys that a server makes for itself, of OpenAI and Hugging Face.
    (re.compile(r"\b(art-|sk-|hf_)[A-Za-z0-9_-]{20,}"), rf"\1{HIDDEN}"),
    # Headers, as headers, dictionaries or lists of pairs of bytes write them.
    (
        re.compile(
            r"(?i)\b((?:authorization|x-api-key)['\"]?\s*[:=,]\s*(?:b?['\"])?(?:(?:bearer|basic)\s+)?)[^\s'\",)]+"
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{HIDDEN}"),
)


class RedactingFormatter(logging.Formatter):
    """Log formatter that replaces API keys and other secrets in each line by `[redacted]`."""

    def __init__(self, fmt: str, secrets: Iterable[str] = ()) -> None:
        """
        Args:
            secrets: strings to replace wherever they occur, whatever they look like.
        """
        super().__init__(fmt)
        # Longest first, because a secret may begin with another one.
        self._secrets = sorted(
            (secret for secret in secrets if len(secret) >= MIN_SECRET_LENGTH), key=len, reverse=True
        )

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text
