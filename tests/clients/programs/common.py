"""What the programs share. Each does one task with one library, as its users write it, and prints the answer as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

URL, KEY, MODEL = os.environ["CLIENT_URL"], os.environ["CLIENT_KEY"], os.environ["CLIENT_MODEL"]
"""Base URL without `/v1`, key and model name."""
QUESTION = "what is under a b?"
PARAMETERS = {
    "type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"], "additionalProperties": False,
}  # fmt: skip


def look_up(key: str) -> str:
    """Find a value by its key."""
    return f"value of {key}"


def main(**tasks: Callable[[], str]) -> None:
    """Run the task that the command line names, and print its answer."""
    print(json.dumps({"answer": tasks[sys.argv[1]]()}))
