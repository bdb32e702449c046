"""A command as a process whose time and memory are measured from outside, with those of all processes below it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

END_S = 30.0
"""Seconds that a command has to end after it was told to."""
LOOK_S = 2.0
"""Seconds between two looks at all processes: a look takes about 20 ms of CPU time."""
_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a command took, with all processes below it."""

    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    """The most memory in use at once. A page that several processes share counts once (Linux' PSS)."""


class MeasuredCommand:
    """A running command. Call `poll` a few times a second until it returns `True`.

    CPU time is counted in two ways, and the larger counts, because each can only miss something: the kernel's sum over
    the command and all descendants that were waited for, and the last times seen of each process by `poll`.
    """

    def __init__(self, command: Sequence[str], *, log: Path) -> None:
        self.exit_code: int | None = None
        self.log = log
        self._started = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_end_with_parent
            )
        self._root = psutil.Process(self._process.pid)
        self._cpu_s: dict[psutil.Process, float] = {}
        self._peak_bytes = 0
        self._looked = 0.0
        self._usage: Usage | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def usage(self) -> Usage:
        """Usage of the ended command."""
        assert self._usage is not None, "the command still runs"
        return self._usage

    def poll(self) -> bool:
        """Look at all processes now and then; return whether the command has ended."""
        if self._usage is not None:
            return True
        if time.perf_counter() - self._looked > LOOK_S:
            self._look()
            self._looked = time.perf_counter()
        pid, status, resources = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.exit_code = self._process.returncode = os.waitstatus_to_exitcode(status)
        reaped_s = resources.ru_utime + resources.ru_stime
        self._usage = Usage(
            time.perf_counter() - self._started, max(reaped_s, sum(self._cpu_s.values())), self._peak_bytes
        )
        return True

    def end(self) -> None:
        """End the command if it still runs: first by a request, then by force."""
        if self._usage is not None:
            return
        self._process.terminate()
        deadline = time.monotonic() + END_S
        while not self.poll():
            if time.monotonic() > deadline:
                self._process.kill()
            time.sleep(0.1)

    def _look(self) -> None:
        memory_bytes = 0
        processes = {self._root, *self._cpu_s}
        with contextlib.suppress(psutil.NoSuchProcess):
            processes |= {*self._root.children(recursive=True)}
        for process in processes:
            if not process.is_running():  # its number may be that of another process by now
                continue
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = process.cpu_times()
                self._cpu_s[process] = times.user + times.system
                memory_bytes += process.memory_full_info().pss
        self._peak_bytes = max(self._peak_bytes, memory_bytes)


def _end_with_parent() -> None:
    """Have the kernel end this process when the process that measures it was killed."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
