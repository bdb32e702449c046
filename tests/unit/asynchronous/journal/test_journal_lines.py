"""A write that the machine did not finish is cut off; damage of what was written is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from art.asynchronous.journal.lines import frame_line, read_journal
from art.errors import StorageError


def write(path: Path, sizes: list[int]) -> list[bytes]:
    """Write a journal whose batches have these numbers of lines. Each line holds its number in the file."""
    lines, offset = [], 0
    for batch, size in enumerate(sizes):
        for _ in range(size):
            content = json.dumps({"event": "x", "number": len(lines), "text": "é" * 20})[1:].encode()
            line, span = frame_line(content, batch=batch, of=size, offset=offset)
            assert span.offset + span.length == offset + len(line) - 1
            lines.append(line)
            offset += len(line)
    path.write_bytes(b"".join(lines))
    return lines


def numbers(path: Path) -> list[int]:
    return [line.record["number"] for line in read_journal(path)]


def test_each_line_is_readable_json_and_found_where_its_span_says(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, [2, 3, 1])
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == list(range(6))
    content = path.read_bytes()
    for line in read_journal(path):
        assert json.loads(b"{" + content[line.span.offset :][: line.span.length]) == line.record


def test_every_cut_leaves_whole_lines_and_is_no_error_after_the_first_batch(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = write(path, [1, 1, 3])
    whole = path.read_bytes()
    for size in range(len(lines[0]), len(whole) + 1):
        path.write_bytes(whole[:size])
        complete = sum(len(b"".join(lines[: n + 1])) - 1 <= size for n in range(len(lines)))
        assert numbers(path) == list(range(complete)), size


@pytest.mark.parametrize("sizes", [[1, 1, 3], [2, 1, 1, 2], [1, 4]])
def test_a_bad_line_is_damage_unless_it_is_of_the_last_write(tmp_path: Path, sizes: list[int]) -> None:
    path = tmp_path / "journal.jsonl"
    lines = write(path, sizes)
    batches = [batch for batch, size in enumerate(sizes) for _ in range(size)]
    for bad, batch in enumerate(batches):
        for text in (b"\0" * (len(lines[bad]) - 1) + b"\n", lines[bad].replace(b'"x"', b'"y"')):
            path.write_bytes(b"".join([*lines[:bad], text, *lines[bad + 1 :]]))
            if batch == 0 or batch != batches[-1]:
                with pytest.raises(StorageError, match=rf"line {bad + 1} of .*journal.jsonl is damaged"):
                    numbers(path)
            else:
                assert numbers(path) == list(range(bad)), "what came later may rest on it"
