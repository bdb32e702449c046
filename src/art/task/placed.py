"""Tasks whose scenarios come from a place that the user names, such as `openenv:http://127.0.0.1:8000`."""

from __future__ import annotations

from typing import Any, Self

from art.task.interface import Task
from art.task.options import label_of, read_options, safe_label


class PlacedTask(Task):
    """A task from an id, an address or a folder, its first argument. Its options are further arguments by name."""

    place: str | None = None
    """What the user wrote after the prefix; `None` for a task made in Python, which keeps its plain name."""

    @classmethod
    def at(cls, place: str, options: dict[str, Any]) -> Self:
        """Make the task of a place, labelled by it.

        Raises:
            ConfigError: an option is not allowed, or there is no such place.
        """
        chosen = read_options(cls.name, cls.options_class, options)
        task = cls(place, **chosen.model_dump())  # type: ignore[call-arg]
        task.place, task.options = place, chosen
        return task

    @property
    def label(self) -> str:
        """The name, the place and the options that differ from their defaults, such as `verifiers-my-env`."""
        name = self.name if self.place is None else safe_label(f"{self.name}-{self.place_name()}")
        return label_of(name, self.options)

    def place_name(self) -> str:
        """The place as a part of the label."""
        return str(self.place)
