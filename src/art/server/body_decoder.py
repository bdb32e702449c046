"""Decode a large JSON text in a process of its own, and hand the value over in pieces.

    thread of the server --text--> this file as a program --pieces, one per line--> thread of the server

A decoder holds Python's lock until it has finished. For a body of 60 MiB that takes a second, during which the event
loop would answer nobody, although it runs in another thread. Here the lock is held for one piece at a time.

The program imports nothing of ART, so that it starts in some 50 ms.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import orjson

PIECE_BYTES = 2**18
"""Length of the JSON text of a piece, about."""
LONGEST_TEXT_BYTES = 2**22
"""Largest length of one text or name. It is a piece, however long it is."""

_ADD, _LIST, _OBJECT, _CLOSE, _FAULT = b"+", b"[", b"{", b"]", b"!"
"""First byte of a line: add these items to the current list or object; begin one in it, under this name; end it; the
text is at fault."""


def decode_apart(body: bytearray) -> Any:
    """Decode a JSON text, and clear it.

    Raises:
        orjson.JSONDecodeError: it is not valid JSON.
        ValueError: a text or name in it is too long.
        subprocess.CalledProcessError: the process was killed, for which the usual reason is lack of memory.
    """
    command = [sys.executable, "-P", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=2**20) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(body)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, which its status tells
        body.clear()  # the process has it now
        value = join(process.stdout)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return value


def join(lines: Iterable[bytes]) -> Any:
    """Put the value together that `main` has taken apart. Raises `ValueError` as `decode_apart` does."""
    stack: list[Any] = [[]]
    whole = stack[0]
    for line in lines:
        kind, value = line[:1], orjson.loads(memoryview(line)[1:])
        if kind == _FAULT:
            message, position = value
            raise ValueError(message) if position is None else orjson.JSONDecodeError(message, "", position)
        if kind == _CLOSE:
            stack.pop()
        elif kind == _ADD:
            _add(stack[-1], value)
        else:
            new: Any = [] if kind == _LIST else {}
            _add(stack[-1], [new] if isinstance(stack[-1], list) else {value: new})
            stack.append(new)
    return whole[0] if whole else None


def _add(container: Any, items: Any) -> None:
    if isinstance(container, list):
        container += items
    else:
        container.update(items)


# -- the program -------------------------------------------------------------------------------------------------------


def main(source: BinaryIO, target: BinaryIO) -> None:
    """Read a JSON text, and write its pieces."""
    try:
        value = orjson.loads(source.read())
        for line in _lines([value]):
            target.write(line + b"\n")
    except orjson.JSONDecodeError as error:
        target.write(_FAULT + orjson.dumps([error.msg, error.pos]) + b"\n")
    except ValueError as error:
        target.write(_FAULT + orjson.dumps([str(error), None]) + b"\n")


def _lines(container: Any) -> Iterator[bytes]:
    """Lines that fill an empty list or object of this kind."""
    is_list = isinstance(container, list)
    batch: Any = [] if is_list else {}
    size = 0
    for name, item in enumerate(container) if is_list else container.items():
        length = len(orjson.dumps(item))
        longest = len(name) if isinstance(name, str) else 0
        if length > PIECE_BYTES and isinstance(item, list | dict):
            if batch:
                yield _ADD + orjson.dumps(batch)
                batch, size = type(batch)(), 0
            yield (_LIST if isinstance(item, list) else _OBJECT) + orjson.dumps(None if is_list else name)
            yield from _lines(item)
            yield _CLOSE + b"null"
            length = 0
        else:
            if is_list:
                batch.append(item)
            else:
                batch[name] = item
            longest = max(longest, length if isinstance(item, str) else 0)
        if longest > LONGEST_TEXT_BYTES:
            raise ValueError(f"a text of {longest} bytes; each may have at most {LONGEST_TEXT_BYTES}")
        size += length
        if size > PIECE_BYTES:
            yield _ADD + orjson.dumps(batch)
            batch, size = type(batch)(), 0
    if batch:
        yield _ADD + orjson.dumps(batch)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
