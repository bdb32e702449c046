"""The two tasks of the core. `from art.tasks import codenames` gives the module of a task of an installed package."""

import importlib
from types import ModuleType

from art.plugins import find_plugins


def __getattr__(name: str) -> ModuleType:
    if name not in find_plugins("art.tasks"):
        raise AttributeError(f"module 'art.tasks' has no attribute {name!r}")
    return importlib.import_module(find_plugins("art.tasks")[name].module)
