"""Copies of a machine's data directory on this machine, over ssh: pulled home, and pushed to the next machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

from art.backends.skypilot.copying import held, only_copy, pack, unpack
from art.backends.ssh.ssh import EXIT_OF_SSH, NO_FORWARDS, Ssh, in_sh, shell_path
from art.errors import ArtError, MachineError, StorageError

T = TypeVar("T")
_SHOWN_STDERR = 800
_BEGIN = "art-copy-begins"
_MAX_LINE_BYTES = 1 << 16
STALL_S = 1800.0
"""Seconds in which nothing moves, after which a copy is given up. The other machine first backs up its database."""
_LOOK_S, _LAST_WORDS_S = 1.0, 5.0


class HomeCopy:
    """The copy of one server's data directory on this machine."""

    def __init__(self, ssh: Ssh, folder: str, target: Path) -> None:
        """
        Args:
            folder: folder of the server on the other machine; its data directory is `data` in it.
            target: folder of the copy here.
        """
        self.target = target
        self._ssh = ssh
        self._program = f"{shell_path(folder)}/venv/bin/python -m art.backends.skypilot.copying"
        self._data = f"{shell_path(folder)}/data"

    async def pull(self) -> int:
        """Bring the copy here up to date. Returns the number of files that came.

        Raises:
            MachineError: the other machine did not send them. The copy is as whole as before.
            StorageError: a file cannot be written here.
        """
        return await _in_thread(self._pull)

    async def push(self) -> int:
        """Fill the empty data directory of the other machine, whose server must not run, with the copy here.

        Returns:
            Number of files that were sent.

        Raises:
            MachineError: the other machine did not take them.
        """
        return await _in_thread(self._push)

    def _pull(self, is_over: threading.Event) -> int:
        def take(stdin: IO[bytes], stdout: IO[bytes]) -> int:
            stdin.write(asked)
            stdin.close()
            return unpack(stdout, self.target)

        with only_copy(self.target):
            asked = json.dumps(held(self.target)).encode()
            return self._talk(f"{self._program} pack {self._data}", take, is_over)

    def _push(self, is_over: threading.Event) -> int:
        def send(stdin: IO[bytes], stdout: IO[bytes]) -> int:
            num_files = pack(self.target, {}, stdin)
            stdin.close()
            stdout.read()
            return num_files

        return self._talk(f"{self._program} restore {self._data}", send, is_over)

    def _talk(self, command: str, talk: Callable[[IO[bytes], IO[bytes]], T], is_over: threading.Event) -> T:
        """Run a command on the other machine, and talk with it over its standard input and output."""
        failure: ArtError | OSError | ValueError | EOFError | None = None
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*self._ssh.base_command(*NO_FORWARDS), in_sh(f"echo {_BEGIN}; exec {command}")], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            watch = _Watch(process, is_over)
            try:
                with process.stdin, process.stdout:
                    _skip_greeting(process.stdout)
                    answer = talk(_Moving(process.stdin, watch), _Moving(process.stdout, watch))  # type: ignore[arg-type]
            except (ArtError, OSError, ValueError, EOFError) as error:
                failure = error
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST_WORDS_S)  # it says why, if it ends by itself
            finally:
                if failure is not None or sys.exc_info()[0] is not None:
                    process.kill()
                process.wait()
                watch.end()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-_SHOWN_STDERR:]
        if isinstance(failure, StorageError) and (_is_of_this_machine(failure) or not (said or watch.said)):
            raise failure
        if process.returncode == EXIT_OF_SSH:
            raise self._ssh.explain(said) from failure
        if failure is not None or process.returncode != 0:
            why = watch.said or said or str(failure)
            raise MachineError(f"copying the data of {self._ssh.name} failed: {why}") from failure
        return answer


class _Watch:
    """Ends a process over which nothing moves any more, or that nobody waits for."""

    def __init__(self, process: subprocess.Popen[bytes], is_over: threading.Event) -> None:
        self.said = ""
        """Why the process was ended; empty if it was not."""
        self.moved_at = time.monotonic()
        self._process, self._is_over = process, is_over
        self._has_ended = threading.Event()
        threading.Thread(target=self._run, name="copying-watch", daemon=True).start()

    def end(self) -> None:
        self._has_ended.set()

    def _run(self) -> None:
        while not self._has_ended.wait(_LOOK_S):
            if self._is_over.is_set():
                self.said = "it was cancelled"
            elif time.monotonic() - self.moved_at > STALL_S:
                self.said = f"nothing has come or gone for {STALL_S:.0f} s"
            if self.said:
                self._process.kill()
                return


class _Moving:
    """A file that tells the watch about each read and write."""

    def __init__(self, file: IO[bytes], watch: _Watch) -> None:
        self._file, self._watch = file, watch
        self.close = file.close

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._watch.moved_at = time.monotonic()
        return content

    def write(self, content: bytes) -> int:
        count = self._file.write(content)
        self._watch.moved_at = time.monotonic()
        return count


async def _in_thread(work: Callable[[threading.Event], T]) -> T:
    """Run `work` in a thread. Its event is set when nobody waits for it any more."""
    is_over = threading.Event()
    try:
        return await asyncio.to_thread(work, is_over)
    finally:
        is_over.set()


def _skip_greeting(stdout: IO[bytes]) -> None:
    """Read what start files of the shell over there print, up to the line that comes before the answer."""
    while line := stdout.readline(_MAX_LINE_BYTES):
        if line.rstrip().endswith(_BEGIN.encode()):
            return
    raise EOFError("the connection ended before the copy began")


def _is_of_this_machine(failure: StorageError) -> bool:
    """Whether a file here could not be read or written. A broken pipe is an end of the connection."""
    return isinstance(failure.__cause__, OSError) and not isinstance(failure.__cause__, BrokenPipeError)
