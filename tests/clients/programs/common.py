"""What the programs share. Each does one task with one library, as its users write it, and prints the answer as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL, KEY, MODEL = os.environ["CLIENT_URL"], os.environ["CLIENT_KEY"], os.environ["CLIENT_MODEL"]
"""Base URL without `/v1`, key and model name."""
QUESTION = "what is under a b?"
QUESTIONS = [QUESTION, "what is under broken?", "and what is under a b now?"]
"""What the task of three turns asks, one after the other."""
PARAMETERS = {
    "type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"], "additionalProperties": False,
}  # fmt: skip


def look_up(key: str) -> str:
    """Find a value by its key. It fails for the key `broken`."""
    if key == "broken":
        raise LookupError("there is no broken")
    return f"value of {key}"


def look_up_or_error(key: str) -> str:
    """Return what `look_up` returns, or its error as text, for libraries that leave both to the user."""
    try:
        return look_up(key)
    except LookupError as error:
        return f"Error: {error}"


class Place(BaseModel):
    """Where something is."""

    model_config = ConfigDict(extra="forbid")  # random weights might else add properties until the context is full

    shelf: Literal["a", "b", "c"]
    row: Literal[1, 2, 3]


def main(package: str, **tasks: Callable[[], Any] | str) -> None:
    """Run the task that the command line names, and print its answer.

    Args:
        package: the library's distribution, whose version the table shows.
        tasks: a function for each task, or the reason why the library cannot do it.
    """
    task = tasks.get(sys.argv[1])
    said = (
        {"unwritten": True} if task is None else {"unsupported": task} if isinstance(task, str) else {"answer": task()}
    )
    print()  # some libraries leave a line without an end
    print(json.dumps({"version": f"{package} {version(package)}", **said}))
