"""The labels that people give a run: tags, notes, a star, and whether it is archived. They are in `labels.json` of the
model's folder, for the page.

    set_labels(DataDir(Path(".art")).model("games", "agent-001"), tags=["baseline"], notes="before the new reward")
"""

from __future__ import annotations

import threading
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from art.errors import InvalidRequestError, StorageError
from art.protocol.training import Wire
from art.storage.history import overwrite_state, read_state
from art.storage.layout import ModelPaths

MOST_TAGS = 20
_WRITING = threading.Lock()

Tag = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=40, pattern=r"^[^,\n]+$")]
"""A word or a few, without commas."""
Tags = Annotated[list[Tag], Field(max_length=MOST_TAGS), AfterValidator(lambda tags: list(dict.fromkeys(tags)))]
"""Tags in the order in which they were given, each once."""
Notes = Annotated[str, StringConstraints(max_length=10_000)]


class RunLabels(Wire):
    """What people say about a run."""

    tags: Tags = []
    notes: Notes = ""
    star: bool = False
    archived: bool = False
    """Whether the list of runs leaves the run out, unless archived runs are asked for."""


class LabelChanges(Wire):
    """Labels to replace; null keeps what is there."""

    tags: Tags | None = None
    notes: Notes | None = None
    star: bool | None = None
    archived: bool | None = None


def read_labels(paths: ModelPaths) -> RunLabels:
    """Return the labels of a run; no labels if its file is a link, which may lead to a private file, or damaged."""
    try:
        return RunLabels() if paths.labels.is_symlink() else RunLabels.model_validate(read_state(paths.labels) or {})
    except (StorageError, ValidationError):
        return RunLabels()


def set_labels(
    paths: ModelPaths,
    *,
    tags: list[str] | None = None,
    notes: str | None = None,
    star: bool | None = None,
    archived: bool | None = None,
) -> RunLabels:
    """Replace some labels of a run, and return all. `None` keeps what is there.

    Raises:
        InvalidRequestError: a tag is empty, has a comma or more than 40 characters, there are more than 20 of them, or
            notes have more than 10,000 characters.
        StorageError: the file cannot be written.
    """
    given = {"tags": tags, "notes": notes, "star": star, "archived": archived}
    changes = {name: value for name, value in given.items() if value is not None}
    with _WRITING:
        try:
            labels = RunLabels.model_validate(read_labels(paths).model_dump() | changes)
        except ValidationError as error:
            fault = error.errors()[0]
            where = str(fault["loc"][0])
            raise InvalidRequestError(
                f"`{where}`: {fault['msg']}; got {str(fault['input'])[:60]!r}. At most {MOST_TAGS} tags of 1 to 40 "
                "characters without commas and line breaks, and notes of at most 10,000 characters",
                param=where,
            ) from None
        overwrite_state(paths.labels, labels.model_dump())
    return labels
