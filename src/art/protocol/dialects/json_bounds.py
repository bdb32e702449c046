"""Counts the values and the depth of JSON text before anything is built from it.

A body of 60 MiB can hold 20 million empty lists, for which Python needs gigabytes and half a minute, during which no
other request is answered. The text itself is cheap to look at, and it may come in pieces:

    bounds = JsonBounds(max_values=100_000, max_depth=64, what="the request body")
    for piece in pieces:
        bounds.feed(piece)      # raises as soon as a limit is passed

It does not check whether the text is valid JSON.
"""

from __future__ import annotations

from itertools import accumulate

from art.errors import InvalidRequestError

_STEP = 2**16
"""Bytes that are looked at in one go. Each go takes less than 2 ms, whatever they are."""
_OPEN, _CLOSE = b"[{", b"]}"
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _OPEN + _CLOSE)
_RISE = [(byte in _OPEN) - (byte in _CLOSE) for byte in range(256)]


class JsonBounds:
    """Limits for one JSON text."""

    def __init__(self, *, max_values: int, max_depth: int, what: str, param: str | None = None) -> None:
        """
        Args:
            what: names the text in errors.
            param: the parameter at fault, in errors.
        """
        self._max_values, self._max_depth, self._what, self._param = max_values, max_depth, what, param
        self.num_values = 0
        """Lists, objects and commas so far, which is at least the number of values that are not empty containers."""
        self._num_quotes = 0
        self._depth = 0
        self._in_string = 0
        self._rest = b""
        """A backslash at the end of the last piece, which belongs to the next character."""

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Look at the next piece of the text.

        Raises:
            InvalidRequestError: the text has too many values, or is nested too deeply.
        """
        for start in range(0, len(piece), _STEP):
            self._look_at(bytes(piece[start : start + _STEP]))

    def feed_text(self, text: str) -> None:
        """Look at a whole text. Its values count together with those of the texts before it. Raises as `feed` does."""
        self._depth = self._in_string = 0
        self._rest = b""
        for start in range(0, len(text), _STEP):
            self._look_at(text[start : start + _STEP].encode("utf-8", "surrogatepass"))

    def _look_at(self, text: bytes) -> None:
        text = self._rest + text
        self._rest = b""
        if b"\\" in text:  # what is left of an escape is at most its letter, so each quote left begins or ends a string
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
            if text.endswith(b"\\"):
                text, self._rest = text[:-1], b"\\"
        parts = text.split(b'"')
        outside = b" ".join(parts[self._in_string :: 2])
        self._in_string ^= (len(parts) - 1) & 1
        self._num_quotes += len(parts) - 1
        brackets = outside.translate(None, _NOT_BRACKETS)
        if brackets:
            depths = list(accumulate(map(_RISE.__getitem__, brackets), initial=self._depth))
            self._depth = depths[-1]
            if max(depths) > self._max_depth:
                raise InvalidRequestError(
                    f"{self._what} has more than {self._max_depth} lists and objects inside one another",
                    param=self._param,
                )
            self.num_values += brackets.count(b"[") + brackets.count(b"{")
        self.num_values += outside.count(b",")
        # A value has two texts at most, its key and itself, so more of them are not valid JSON.
        if self.num_values > self._max_values or self._num_quotes > 4 * (self._max_values + 1):
            raise InvalidRequestError(
                f"{self._what} has more than {self._max_values} values; send less at a time", param=self._param
            )
