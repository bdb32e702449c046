"""Follows the log of a server on another machine, over connections that may break.

    connection --> "art-log NUMBER START", then the log from START on --> write
    it breaks  --> another connection, which goes on at the first byte that has not come

NUMBER is the log's file number there. A file of another number is read from its beginning, and so is one that has
become shorter, because the keeper empties a log that is too large.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from typing import NoReturn

from art.backends.ssh.ssh import EXIT_OF_SSH, SHOWN_STDERR, Ssh, end_process, shell_path, start_process
from art.errors import MachineError, UnreachableError

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0
"""Pause before the first attempt to connect again, and the longest one; they double in between."""
_PIECE_BYTES = 1 << 16
_MARK = b"art-log"
_NO_LOG = 3
_SCRIPT = """\
log={log}
[ -e "$log" ] || exit {no_log}
number=$(ls -i "$log" | awk '{{print $1}}')
size=$(($(wc -c < "$log")))
if [ -z "{number}" ]; then start=$((size - $(head -c $size "$log" | tail -n {num_lines} | wc -c)))
elif [ "$number" = "{number}" ] && [ $size -ge {offset} ]; then start={offset}
else start=0; fi
echo "{mark} $number $start"
exec 3<&0
tail -c +$((start + 1)) -F "$log" 2> /dev/null &
tail=$!
{{ cat <&3; kill $tail; }} > /dev/null 2>&1 &
wait $tail
"""
"""A script for any POSIX shell. Its standard input ends with the connection, and then it ends `tail` too: otherwise
`tail` would stay there until the next line of the log."""


class LogFollower:
    """Follows one log until it is cancelled."""

    def __init__(
        self, ssh: Ssh, folder: str, *, num_lines: int, write: Callable[[bytes], None], say: Callable[[str], None]
    ) -> None:
        """
        Args:
            folder: the server's folder on the machine.
            num_lines: how many of the lines that are there already are shown first.
            write: called with each piece of the log, in order. No byte comes twice or is left out, except that after a
                connection broke, a log that was emptied since it began is read from its beginning again.
            say: called with a line when the connection is lost, and when it is there again.
        """
        self._ssh = ssh
        self._folder = folder
        self._num_lines = num_lines
        self._write = write
        self._say = say
        self._number = ""
        self._offset = 0
        self._is_lost = False
        self._delay_s = FIRST_DELAY_S

    async def run(self) -> NoReturn:
        """Follow the log. A lost connection is made again for as long as it takes.

        Raises:
            UnreachableError: the machine cannot be reached at first.
            MachineError: the machine lets nobody in, or there is no log.
        """
        while True:
            try:
                reason = await self._follow()
            except UnreachableError as error:
                if not self._number:
                    raise
                reason = error.message
            if not self._is_lost:
                self._say(f"{self._ssh.name}: the connection is lost; trying again until Ctrl-C ({reason})")
            self._is_lost = True
            await asyncio.sleep(self._delay_s)
            self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    async def _follow(self) -> str:
        """Follow the log over one connection, and say why it ended."""
        process = await start_process(
            *self._ssh.base_command(), f"sh -c {shlex.quote(self._script())}", stdin=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.ensure_future(process.stderr.read())
        try:
            await self._read(process.stdout)
            text = (await errors).decode(errors="replace")
            code = await process.wait()
        finally:
            errors.cancel()
            await end_process(process)
        if code == EXIT_OF_SSH:
            raise self._ssh.explain(text)
        if code == _NO_LOG:
            raise MachineError(
                f"there is no log in {self._folder} on {self._ssh.name}; the server was never started there, or is down"
            )
        reason = text.strip()[-SHOWN_STDERR:] or f"the command there ended with status {code}"
        if not self._number:
            raise MachineError(f"{self._ssh.name}: reading the log failed: {reason}")
        return reason

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        while line := await stdout.readline():  # a login shell may print something of its own first
            _, mark, place = line.partition(_MARK)
            if mark:
                break
        else:
            return
        number, start = place.split()
        self._number, self._offset, self._delay_s = number.decode(), int(start), FIRST_DELAY_S
        if self._is_lost:
            self._say(f"{self._ssh.name}: connected again")
            self._is_lost = False
        while piece := await stdout.read(_PIECE_BYTES):
            self._offset += len(piece)
            self._write(piece)

    def _script(self) -> str:
        return _SCRIPT.format(
            log=f"{shell_path(self._folder)}/server.log", no_log=_NO_LOG, mark=_MARK.decode(), number=self._number,
            offset=self._offset, num_lines=self._num_lines,
        )  # fmt: skip
