"""With this folder on PYTHONPATH, ART's modules take this machine for a Mac, in this process and its children.

They find neither /proc nor what only Linux has. Other packages, and torch with its devices, are those of this machine.
"""

from __future__ import annotations

import builtins
import pathlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tests.support.windows import StandIn

LACKING_OF = {
    "os": {"pidfd_open", "sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fadvise"},
    "socket": {"SOCK_SEQPACKET", "SOCK_CLOEXEC", "SO_PEERCRED"},
    "select": {"epoll"},
    "signal": {"SIGRTMIN", "SIGRTMAX", "pthread_sigqueue"},
}
_OF_LINUX = (("/", "proc"), ("/", "sys"))


def become_macos() -> None:
    import ctypes

    def no_library(name: Any = None, *_: object, **__: object) -> ModuleType:
        return ModuleType("libSystem")  # without prctl and malloc_trim

    stand_ins: dict[str, ModuleType] = {
        name: StandIn(__import__(name), lacking, {}) for name, lacking in LACKING_OF.items()
    }
    stand_ins["sys"] = StandIn(sys, set(), {"platform": "darwin"})
    stand_ins["ctypes"] = StandIn(ctypes, set(), {"CDLL": no_library})
    real_import, real_open, real_exists = builtins.__import__, pathlib.Path.open, pathlib.Path.exists

    def import_(
        name: str, globals: Mapping[str, Any] | None = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        is_ours = str((globals or {}).get("__name__", "")).partition(".")[0] == "art" and not level
        stand_in = stand_ins.get(name) if is_ours else None
        return stand_in or real_import(name, globals, locals, fromlist, level)

    def open_(path: pathlib.Path, *args: Any, **kwargs: Any) -> Any:
        if path.parts[:2] in _OF_LINUX:
            raise FileNotFoundError(2, "No such file or directory on a Mac", str(path))
        return real_open(path, *args, **kwargs)

    def exists(path: pathlib.Path, **kwargs: Any) -> bool:
        return path.parts[:2] not in _OF_LINUX and real_exists(path, **kwargs)

    builtins.__import__ = import_
    pathlib.Path.open = open_  # type: ignore[method-assign]
    pathlib.Path.exists = exists  # type: ignore[method-assign]


become_macos()
