"""Decode a large JSON text in a process of its own, and hand the value over in pieces.

    thread of the server --text--> this file as a program --pieces, one per line--> thread of the server

A decoder holds Python's lock until it has finished. For a body of 60 MiB that takes a second, during which the event
loop would answer nobody, although it runs in another thread. Here the lock is held for one piece at a time.

The program imports nothing of ART, so that it starts in some 50 ms.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import orjson

PIECE_BYTES = 2**18
"""Length of the JSON text of a piece, about."""
LONGEST_TEXT_BYTES = 2**22
"""Largest length of one text or name. It is a piece, however long it is."""


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
    whole: list[Any] = []
    for line in lines:
        path, part = orjson.loads(line)
        if path is None:
            message, position = part
            raise ValueError(message) if position is None else orjson.JSONDecodeError(message, "", position)
        container: Any = whole
        for name in path:
            if isinstance(container, dict):
                container.setdefault(name, type(part)())
            elif name == len(container):
                container.append(type(part)())
            container = container[name]
        if isinstance(part, dict):
            container.update(part)
        else:
            container.extend(part)
    return whole[0] if whole else None


# -- the program -------------------------------------------------------------------------------------------------------


def main(source: BinaryIO, target: BinaryIO) -> None:
    """Read a JSON text, and write its pieces: in each line the path of a list or object, and what to add to it.

    The path [0] is that of the value itself. `None` in place of a path means that the text is at fault.
    """

    def write(path: list[int | str] | None, part: Any) -> None:
        target.write(orjson.dumps([path, part]) + b"\n")

    try:
        _take_apart([orjson.loads(source.read())], [], write)
    except orjson.JSONDecodeError as error:
        write(None, [error.msg, error.pos])
    except ValueError as error:
        write(None, [str(error), None])


def _take_apart(container: Any, path: list[int | str], write: Callable[[list[int | str], Any], None]) -> None:
    """Write a list or object as pieces, each of about `PIECE_BYTES`."""
    part, size = type(container)(), 0
    for name, item in enumerate(container) if isinstance(container, list) else container.items():
        length = len(orjson.dumps(item))
        longest = max(len(name) if isinstance(name, str) else 0, length if isinstance(item, str) else 0)
        if longest > LONGEST_TEXT_BYTES:
            raise ValueError(f"a text of {longest} bytes; each may have at most {LONGEST_TEXT_BYTES}")
        is_taken_apart = length > PIECE_BYTES and isinstance(item, list | dict)
        if is_taken_apart or size > PIECE_BYTES:
            write(path, part)
            part, size = type(container)(), 0
        if is_taken_apart:
            _take_apart(item, [*path, name], write)
            continue
        if isinstance(part, list):
            part.append(item)
        else:
            part[name] = item
        size += length
    write(path, part)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
