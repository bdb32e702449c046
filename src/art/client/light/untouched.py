"""Whether the SDK's own functions are in place: tracers, mocks and `art.capture` replace them to see requests."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


class Original:
    """A function of a class, and whether it still is the one that its library defines."""

    def __init__(self, owner: type, name: str, library: ModuleType) -> None:
        self._owner, self._name = owner, name
        self._folder = str(Path(library.__file__ or "").parent)
        self._last: object = None
        self._is_original = False

    def is_in_place(self) -> bool:
        current = getattr(self._owner, self._name, None)
        if current is not self._last:
            self._last = current
            # `type`, because proxies such as those of wrapt pretend to be functions
            self._is_original = type(current) is FunctionType and current.__code__.co_filename.startswith(self._folder)
        return self._is_original


def hides_method(thing: Any) -> bool:
    """Whether an attribute of an object hides a method of its class, as `client.post = traced` does."""
    return any(callable(getattr(type(thing), name, None)) for name in vars(thing))
