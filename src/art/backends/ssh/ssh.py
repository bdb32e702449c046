"""`Ssh`: one machine, reached by the system's OpenSSH client.

The client reads the user's `~/.ssh/config`, agent and known hosts as in a terminal. It never asks a question: what a
terminal would ask (a password, an unknown host key) is an error here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from art.errors import ConfigError, MachineError, UnreachableError

_SETTINGS = {
    "BatchMode": "yes",
    "ConnectTimeout": 15,
    "ServerAliveInterval": 5,
    "ServerAliveCountMax": 4,
    "ControlMaster": "no",  # a connection of ours that a terminal shares would last as long as that terminal
    "RemoteCommand": "none",  # ssh refuses a command beside one of the configuration, such as `tmux attach`
    "LogLevel": "INFO",  # a quieter configuration would hide why a connection fails
}
"""Options of every ssh process. They win over those of the user's configuration."""
NO_FORWARDS = ("-o", "ClearAllForwardings=yes")
"""Options of a command: ports of the user's configuration are for a terminal, which may hold them already."""
EXIT_OF_SSH = 255
"""Exit code by which OpenSSH says that it failed itself, and not the command on the other machine."""
PUT_TIMEOUT_S = 600.0
SHOWN_STDERR = 1500
"""Number of characters of an error output that a message quotes."""
_REFUSALS = (
    r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed|authenticity of host|bad permissions"
    r"|Identity file .* not accessible|Load key .*: (?:invalid|bad|error|Permission)|Could not resolve hostname"
    r"|Permission denied \(|Too many authentication failures|No supported authentication|bad configuration option"
)
"""What OpenSSH writes when it fails until somebody acts. All other failures may pass."""


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended, and what it wrote."""

    rc: int
    stdout: str
    stderr: str


class Ssh:
    """One machine and account that commands run on."""

    def __init__(self, host: str, *, config: str | Path | None = None) -> None:
        """
        Args:
            host: what a person gives to `ssh`: a name or address, `user@name`, `ssh://user@name:port`, or an alias of
                `~/.ssh/config`, where a key file, a jump host and others can be set.
            config: configuration file in place of `~/.ssh/config`.

        Raises:
            ConfigError: this cannot be a host.
        """
        if not re.fullmatch(r"[^\s-]\S*", host):
            raise ConfigError(f'a host is a name like "gpu-box" or "alice@gpu-box", got {host!r}', param="host")
        self.host = host
        self.config = Path(config).expanduser().absolute() if config else None

    def base_command(self, *options: str) -> list[str]:
        """The arguments of an ssh process that asks no questions, up to the host. The remote command may follow.

        Args:
            options: further options of OpenSSH, such as `-L` with its value.

        Raises:
            ConfigError: there is no ssh program.
        """
        program = shutil.which("ssh")
        if program is None:
            raise ConfigError(
                "there is no `ssh` program on PATH; install OpenSSH's client (Debian: `apt install openssh-client`; "
                "Windows: the optional feature OpenSSH Client)"
            )
        pairs = [word for key, value in _SETTINGS.items() for word in ("-o", f"{key}={value}")]
        config = ["-F", str(self.config)] if self.config else []
        return [program, "-T", *pairs, *config, *options, "--", self.host]

    async def run(
        self,
        command: str,
        *,
        input: bytes = b"",
        timeout_s: float,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:
        """Run a command, and wait for its end.

        Args:
            command: a script of one line for `sh`. Others see it in lists of processes: secrets belong into `input`.
            input: standard input of the command.
            timeout_s: seconds after which the connection is ended.
            on_line: called with each line of standard output as it comes.

        Raises:
            ConfigError: there is no ssh program.
            UnreachableError: the machine cannot be reached now, or the command did not end in time.
            MachineError: the machine refuses the connection: unknown host key, no permission.
        """
        arguments = [*self.base_command(*NO_FORWARDS), in_sh(command)]
        done = await run_process(arguments, input=input, timeout_s=timeout_s, on_line=on_line)
        if done.rc == EXIT_OF_SSH:
            raise self.explain(done.stderr)
        return done

    async def put(self, content: bytes, path: str) -> None:
        """Write a file of the other machine, readable for its owner only. Its folder is made if needed.

        Args:
            path: absolute, or beginning with `~/`.

        Raises:
            MachineError: the file cannot be written there.
        """
        part = f"{path}.{secrets.token_hex(4)}.part"
        folder, file, part = (shell_path(one) for one in (path.rpartition("/")[0], path, part))
        # A connection that breaks looks like the end of the content to `cat`, so its size is checked.
        script = (
            f"umask 077 && mkdir -p {folder} && cat > {part} && [ $(wc -c < {part}) -eq {len(content)} ] "
            f"&& mv {part} {file} || {{ rm -f {part}; exit 1; }}"
        )
        done = await self.run(script, input=content, timeout_s=PUT_TIMEOUT_S)
        if done.rc != 0:
            raise MachineError(f"{self.host}: writing {path} failed: {done.stderr.strip()[-SHOWN_STDERR:]}")

    def explain(self, errors: str) -> MachineError:
        """Make the error for what OpenSSH wrote when it failed."""
        said = errors.strip()[-SHOWN_STDERR:].removeprefix("ssh: ") or "it gave no reason"
        how = shlex.join(["ssh", *(["-F", str(self.config)] if self.config else []), self.host])
        kind = MachineError if re.search(_REFUSALS, said, re.IGNORECASE) else UnreachableError
        return kind(
            f"{self.host} cannot be reached over ssh. `{how}` must work in a terminal without a question: with a key "
            f"and not a password, and with a host key that you have accepted. ssh said: {said}"
        )


def in_sh(script: str) -> str:
    """Return the command that runs a script of one line in `sh`, whatever the login shell of the account is."""
    return f"exec sh -c {shlex.quote(script)}"


def shell_path(path: str) -> str:
    """Quote a path for the shell of the other machine. A leading `~/` means the home directory there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


async def run_process(
    command: Sequence[str],
    *,
    timeout_s: float,
    input: bytes = b"",
    on_line: Callable[[str], None] | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Completed:
    """Run a program in a session of its own, and wait for its end.

    A thread talks to it: asyncio would wait for ever for the pipes of a process that was cancelled at its start.

    Raises:
        UnreachableError: it did not end in time, and was killed with all that it had started.
    """
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(  # noqa: ASYNC220  # a thread waits for it
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, cwd=cwd,
            env=env,
        )  # fmt: skip

        def talk() -> str:
            lines = []
            with process:
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(BrokenPipeError):  # the command takes no more input; its exit code says why
                    process.stdin.write(input)
                    process.stdin.close()
                for raw in process.stdout:
                    lines.append(raw.decode(errors="replace"))
                    if on_line is not None:
                        loop.call_soon_threadsafe(on_line, lines[-1].rstrip("\n"))
            return "".join(lines)

        try:
            async with asyncio.timeout(timeout_s):
                stdout = await asyncio.to_thread(talk)
        except TimeoutError:
            raise UnreachableError(f"`{shlex.join(command)[-120:]}` did not end within {timeout_s:.0f} s") from None
        finally:
            end_process(process)
        stderr.seek(0)
        return Completed(process.returncode, stdout, stderr.read().decode(errors="replace"))


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started in a session of its own, with all that it started, if it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg"):  # Windows has no process groups; there only the process itself is killed
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
