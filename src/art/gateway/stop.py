"""Stop strings over tokens: find them wherever token borders fall, and let no part of one out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan lets through.

    Example: stop string "END", tokens "go", " E", "N", "D now"
        after " E"     token_ids=["go"]      the space too belongs to a token that may be cut
        after "D now"  token_ids=[], cut=b" ", num_matched=4 of all tokens pushed
    """

    token_ids: list[int]
    """Whole tokens, free of any stop string."""
    cut: bytes = b""
    """At a match: the bytes before it of the token in which it begins."""
    matched: bool = False


class StopScanner:
    """Feed it the tokens of one completion; it holds back those that may be part of a stop string."""

    def __init__(self, strings: list[str], token_bytes: Mapping[int, bytes]) -> None:
        self._strings = [string.encode() for string in strings]
        self._token_bytes = token_bytes
        self._held: list[int] = []
        self._buffer = b""  # bytes of the held tokens
        self.num_tokens = 0
        """Tokens seen, up to and including the one that completed a match."""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, token_ids: list[int]) -> Scan:
        released: list[int] = []
        for token in token_ids:
            self.num_tokens += 1
            self._held.append(token)
            self._buffer += self._token_bytes[token]
            found = [(start, string) for string in self._strings if (start := self._buffer.find(string)) >= 0]
            if found:
                start, string = min(found, key=lambda match: match[0])
                self.matched = string.decode()
                whole, cut = self._release(start)
                return Scan(released + whole, cut, matched=True)
            released += self._release(len(self._buffer) - self._longest_prefix())[0]
        return Scan(released)

    def finish(self) -> list[int]:
        """The tokens still held, when the completion ended otherwise."""
        held, self._held, self._buffer = self._held, [], b""
        return held

    def _release(self, end: int) -> tuple[list[int], bytes]:
        """Tokens that lie wholly before byte `end` of the buffer, and the bytes up to there of the next one."""
        count = position = 0
        for token in self._held:
            size = len(self._token_bytes[token])
            if position + size > end:
                break
            position += size
            count += 1
        whole, self._held = self._held[:count], self._held[count:]
        cut = self._buffer[position:end]
        self._buffer = self._buffer[position:]
        return whole, cut

    def _longest_prefix(self) -> int:
        """Length of the longest end of the buffer that begins some stop string."""
        buffer = self._buffer
        longest = max(len(string) for string in self._strings) - 1
        for size in range(min(longest, len(buffer)), 0, -1):
            tail = buffer[len(buffer) - size :]
            if any(string.startswith(tail) for string in self._strings):
                return size
        return 0
