"""Finds what packages beside the core add to ART: commands, tasks, trackers, backends, pages and names.

A package declares entry points in its pyproject.toml, for instance a task:

    [project.entry-points."art.tasks"]
    poker = "poker_task:Poker"

The packages of this repository beside `art` are found in the same way. docs/extending.md has an example of each group.
"""

from __future__ import annotations

import difflib
import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from art.errors import ConfigError

Group = Literal["art.backends", "art.clusters", "art.commands", "art.names", "art.pages", "art.tasks", "art.trackers"]


@functools.cache
def find_plugins(group: Group) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted. Nothing is imported.

    Raises:
        ConfigError: two packages offer different objects under one name.
    """
    plugins: dict[str, EntryPoint] = {}
    for plugin in sorted(entry_points(group=group)):
        other = plugins.setdefault(plugin.name, plugin)
        if other.value != plugin.value:
            raise ConfigError(
                f"two installed packages offer {plugin.name!r} in the group {group!r}: {other.value} and "
                f"{plugin.value}. Uninstall one of them"
            )
    return plugins


def load_plugin(group: Group, name: str) -> Any:
    """Import and return the object of an entry point.

    Raises:
        ConfigError: no installed package offers this name.
    """
    plugins = find_plugins(group)
    if name not in plugins:
        near = difflib.get_close_matches(name, plugins, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(plugins) or 'none'}"
        raise ConfigError(f"no installed package offers {name!r} in the group {group!r}; {hint}")
    return plugins[name].load()


def find_older() -> Any | None:
    """Return the module that knows the spellings of older code; `None` if its package is not installed.

    The core asks for it only when it meets a spelling that it does not know itself.
    """
    return load_plugin("art.names", "older") if "older" in find_plugins("art.names") else None
