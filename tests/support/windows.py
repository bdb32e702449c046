"""Runs a Python program as if this machine ran Windows, as far as ART's own modules can tell.

    python -X warn_default_encoding -m tests.support.windows script.py ARGUMENTS

Only ART's modules meet it: other packages have releases of their own for Windows. They do not find the modules and
functions that Windows lacks (`fcntl`, `os.fork`, `os.pread`, SIGKILL ...). The event loop has no signal handlers, as
Windows' own. An open file cannot be renamed or deleted, a directory cannot be opened, a file that may only be read
cannot be synced, names that Windows refuses raise an error, and so does text without an encoding. What differs in the
kernel itself (paths with drives and backslashes, real locks, virus scanners) is not here.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import fcntl
import os
import re
import runpy
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

LACKING = {"fcntl", "grp", "posix", "pwd", "resource", "termios", "tty", "uvloop"}
"""Modules that Windows does not have."""
LACKING_OF = {
    "asyncio": {"open_unix_connection", "start_unix_server"},
    "os": {
        "chown", "fchown", "fork", "forkpty", "geteuid", "getgid", "getloadavg", "getpgid", "getpgrp", "getuid", "killpg",
        "mkfifo", "nice", "openpty", "pidfd_open", "pipe2", "posix_spawn", "pread", "preadv", "pwrite", "pwritev",
        "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sendfile", "setpriority", "setsid", "statvfs",
        "sysconf", "uname", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG",
    },
    "select": {"epoll", "poll", "POLLIN"},
    "signal": {"SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGUSR1", "SIGUSR2"},
    "socket": {"AF_UNIX", "MSG_DONTWAIT", "recv_fds", "send_fds"},
    "time": {"clock_gettime", "tzset"},
}  # fmt: skip
_REFUSED = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ]$|^(aux|con|nul|prn|com\d|lpt\d)(\.|$)', re.IGNORECASE)
_CTRL_C = 0
"""Windows takes signal 0 for Ctrl-C."""


class StandIn(ModuleType):
    """A module that lacks some names and has others replaced."""

    def __init__(self, real: ModuleType, lacking: set[str], replaced: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced)
        self._real, self._lacking = real, lacking

    def __getattr__(self, name: str) -> Any:
        if name in self._lacking:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on Windows")
        return getattr(self._real, name)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that lacks what Windows' `ProactorEventLoop` lacks."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError

    add_signal_handler = remove_signal_handler = add_reader = add_writer = _refuse
    create_unix_connection = create_unix_server = _refuse  # type: ignore[assignment]


class _Loops(asyncio.DefaultEventLoopPolicy):
    _loop_factory = _Loop


def _kill(pid: int, number: int) -> None:
    assert number != _CTRL_C, "os.kill(pid, 0) would press Ctrl-C on Windows"
    os.kill(pid, number)


def _open(path: Any, flags: int, mode: int = 0o777) -> int:
    if Path(path).is_dir():
        raise PermissionError(errno.EACCES, "a directory cannot be opened on Windows", str(path))
    return os.open(path, flags, mode)


def _fsync(file: int) -> None:
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "a file that may only be read cannot be synced on Windows")
    os.fsync(file)


def _locking(file: int, how: int, num_bytes: int) -> None:
    assert (how, num_bytes) == (1, 1)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class _Kernel:
    """The functions of kernel32 by which one looks at another process."""

    class _OpenProcess:
        def __call__(self, rights: int, inherited: bool, pid: int) -> int:
            return pid if Path(f"/proc/{pid}").exists() else 0

    def __init__(self, *_: object, **__: object) -> None:
        self.OpenProcess = self._OpenProcess()

    def WaitForSingleObject(self, process: Any, timeout_ms: int) -> int:
        return 258

    def CloseHandle(self, process: Any) -> None:
        pass


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(content)
    return module


def _stand_ins() -> dict[str, ModuleType]:
    import ctypes
    import platform

    replaced: dict[str, dict[str, Any]] = {
        "os": {"name": "nt", "kill": _kill, "open": _open, "fsync": _fsync},
        "sys": {"platform": "win32"},
        "platform": {"system": lambda: "Windows", "machine": lambda: "AMD64"},
        "ctypes": {"WinDLL": _Kernel, "get_last_error": lambda: 87},
    }
    real = {"ctypes": ctypes, "platform": platform} | {name: __import__(name) for name in ("os", "sys", *LACKING_OF)}
    made: dict[str, ModuleType] = {
        name: StandIn(module, LACKING_OF.get(name, set()), replaced.get(name, {})) for name, module in real.items()
    }
    return made | {"msvcrt": _module("msvcrt", locking=_locking, LK_NBLCK=1)}


def _is_open(path: str) -> bool:
    """Whether this process has the file, or one below the folder, open."""
    whole = os.path.realpath(path)
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target == whole or target.startswith(whole + "/"):
            return True
    return False


def _check_name(path: str) -> None:
    for part in Path(path).parts:
        if part not in ("/", ".", "..") and _REFUSED.search(part):
            raise OSError(errno.EINVAL, "Windows refuses this name", path)


def _watch(event: str, args: tuple[Any, ...]) -> None:
    makes_file = event == "open" and isinstance(args[0], str) and args[2] & os.O_CREAT
    if makes_file or event == "os.mkdir":
        _check_name(str(args[0]))
    elif event in ("os.rename", "os.remove"):
        paths = [str(path) for path in args[:2] if isinstance(path, (str, os.PathLike))]
        for path in paths:
            _check_name(path)
            if _is_open(path):
                raise PermissionError(errno.EACCES, "the file is open, and Windows does not let it go", path)


def become_windows() -> None:
    """Make this process look like one on Windows to ART's modules, none of which may be imported yet."""
    assert not any(name.partition(".")[0] == "art" for name in sys.modules)
    assert sys.flags.warn_default_encoding
    stand_ins, real_import = _stand_ins(), builtins.__import__

    def import_(
        name: str, globals: Mapping[str, Any] | None = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        if str((globals or {}).get("__name__", "")).partition(".")[0] != "art" or level:
            return real_import(name, globals, locals, fromlist, level)
        if name in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return stand_ins.get(name) or real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = import_
    asyncio.set_event_loop_policy(_Loops())
    warnings.filterwarnings("error", category=EncodingWarning, module=r"art(\.|$)")
    sys.addaudithook(_watch)


if __name__ == "__main__":
    become_windows()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
