"""Files of checkpoints, which policies and optimisers stream."""

from __future__ import annotations

from pathlib import Path

from art.storage.checkpoints import Content, write_content


def whole(content: Content) -> bytes:
    """Join the pieces of a file."""
    return content if isinstance(content, bytes) else b"".join(content)


def save_content(file: Path, content: Content) -> Path:
    """Write a file and return its path."""
    write_content(file, content)
    return file
