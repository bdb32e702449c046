"""Find stop strings in a stream of tokens, also across token borders, and hold back tokens that may begin one."""

from __future__ import annotations

from collections.abc import Mapping


class StopScanner:
    """Scans the tokens of one completion and holds back those that may be part of a stop string."""

    def __init__(self, strings: list[str], token_bytes: Mapping[int, bytes]) -> None:
        self._strings = [string.encode() for string in strings]
        self._token_bytes = token_bytes
        self._held: list[int] = []
        self._buffer = b""  # bytes of the held tokens
        self.num_tokens = 0
        """Number of tokens scanned; after a match, up to and including the token that completed it."""
        self.matched: str | None = None
        """The stop string that was found first."""

    def push(self, token_ids: list[int]) -> tuple[list[int], bytes]:
        """Scan tokens, and return those that are certainly not part of a stop string.

        At a match, also return the bytes before the stop string in the token where it begins.

        Example: stop string "END", tokens "go", " E", "N", "D now"
            after " E"     (["go"], b"")      " E" is held back whole, since it may have to be cut
            after "D now"  ([], b" ")         and `matched` is "END"
        """
        released: list[int] = []
        for token in token_ids:
            self.num_tokens += 1
            self._held.append(token)
            self._buffer += self._token_bytes[token]
            matches = [(start, string) for string in self._strings if (start := self._buffer.find(string)) >= 0]
            if matches:
                start, string = min(matches, key=lambda match: match[0])
                self.matched = string.decode()
                whole, cut = self._release(start)
                return released + whole, cut
            released += self._release(len(self._buffer) - self._longest_prefix())[0]
        return released, b""

    def finish(self) -> list[int]:
        """Release the tokens still held back, for a completion that ended without a stop string."""
        held, self._held, self._buffer = self._held, [], b""
        return held

    def _release(self, end: int) -> tuple[list[int], bytes]:
        """Release the tokens that end at or before byte `end` of the buffer, and the next token's bytes up to there."""
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
        """Length of the longest suffix of the buffer that is a proper prefix of a stop string."""
        buffer = self._buffer
        longest = max(len(string) for string in self._strings) - 1
        sizes = range(min(longest, len(buffer)), 0, -1)
        return next((size for size in sizes if any(text.startswith(buffer[-size:]) for text in self._strings)), 0)
