"""Copies of a machine's data directory on this machine, over ssh: pulled home, and pushed to the next machine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

from art.backends.skypilot.copying import held, pack, unpack
from art.backends.ssh.ssh import Ssh, shell_path
from art.errors import ArtError, MachineError, StorageError

T = TypeVar("T")
_SHOWN_STDERR = 800


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
        return await asyncio.to_thread(self._pull)

    async def push(self) -> int:
        """Fill the empty data directory of the other machine, whose server must not run, with the copy here.

        Returns:
            Number of files that were sent.

        Raises:
            MachineError: the other machine did not take them.
        """
        return await asyncio.to_thread(self._push)

    def _pull(self) -> int:
        asked = json.dumps(held(self.target)).encode()

        def take(stdin: IO[bytes], stdout: IO[bytes]) -> int:
            stdin.write(asked)
            stdin.close()
            return unpack(stdout, self.target)

        return self._talk(f"{self._program} pack {self._data}", take)

    def _push(self) -> int:
        def send(stdin: IO[bytes], stdout: IO[bytes]) -> int:
            num_files = pack(self.target, {}, stdin)
            stdin.close()
            stdout.read()
            return num_files

        return self._talk(f"{self._program} restore {self._data}", send)

    def _talk(self, command: str, talk: Callable[[IO[bytes], IO[bytes]], T]) -> T:
        """Run a command on the other machine, and talk with it over its standard input and output."""
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*self._ssh.base_command(), command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            failure: ArtError | OSError | ValueError | None = None
            with process.stdin, process.stdout:
                try:
                    answer = talk(process.stdin, process.stdout)
                except (ArtError, OSError, ValueError) as error:
                    failure = error
                    process.kill()
            process.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-_SHOWN_STDERR:]
        if isinstance(failure, StorageError) and not said:
            raise failure
        if failure is not None or process.returncode != 0:
            why = said or str(failure)
            raise MachineError(f"copying the data of {self._ssh.name} failed: {why}") from failure
        return answer
