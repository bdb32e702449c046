"""`Ssh`: one machine, reached by the system's OpenSSH client. `Tunnel`: a port here that leads to one of its ports.

The client reads the user's `~/.ssh/config`, agent and known hosts as in a terminal. It never asks a question: what a
terminal would ask (a password, an unknown host key) is an error here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art.backoff import retry
from art.errors import ConfigError, MachineError, UnreachableError
from art.storage.logs import describe_exit

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
SHOWN_STDERR = 1500
"""Number of characters of an error output that a message quotes."""
_REFUSALS = (
    r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed|authenticity of host|bad permissions"
    r"|Identity file .* not accessible|Load key .*: (?:invalid|bad|error|Permission)|Could not resolve hostname"
    r"|Permission denied \(|Too many authentication failures|No supported authentication|bad configuration option"
)
"""What OpenSSH writes when it fails until somebody acts. All other failures may pass."""
_OPEN = "art-tunnel-open"
OPEN_TIMEOUT_S, COMMAND_TIMEOUT_S = 60.0, 150.0
NUM_TRIES = 5
"""How often a command is sent, or a tunnel opened, whose connection breaks."""


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
        self._config_options = ["-F", str(self.config)] if self.config else []

    def base_command(self, *options: str) -> list[str]:
        """The arguments of an ssh process with further options of OpenSSH, up to the host. A command may follow.

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
        return [program, "-T", *pairs, *self._config_options, *options, "--", self.host]

    @retry(NUM_TRIES, delay=0.5, backoff_factor=1.0, exceptions=(UnreachableError,))
    async def run(
        self, command: str, *, input: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of one line for `sh`, and wait for its end; again if the connection breaks.

        Others see the script in lists of processes: secrets belong into `input`.

        Raises:
            UnreachableError: the machine cannot be reached now, or the command did not end in time.
            MachineError: the machine refuses the connection: unknown host key, no permission.
        """
        # Ports of the user's configuration are for a terminal, which may hold them already.
        arguments = [*self.base_command("-o", "ClearAllForwardings=yes"), in_sh(command)]
        done = await run_process(arguments, input=input, timeout_s=timeout_s)
        if done.returncode == 255:  # OpenSSH failed itself, and not the command on the other machine
            raise self.explain(done.stderr)
        return done

    def explain(self, errors: str) -> MachineError:
        """Make the error for what OpenSSH wrote when it failed."""
        said = errors.strip()[-SHOWN_STDERR:].removeprefix("ssh: ") or "it gave no reason"
        how = shlex.join(["ssh", *self._config_options, self.host])
        kind = MachineError if re.search(_REFUSALS, said, re.IGNORECASE) else UnreachableError
        return kind(
            f"{self.host} cannot be reached over ssh. `{how}` must work in a terminal without a question: with a key "
            f"and not a password, and with a host key that you have accepted. ssh said: {said}"
        )


class Tunnel:
    """An `ssh -L` from a port of this machine, which stays the same when the tunnel is opened again.

    The process runs `cat` on the other machine and reads from a pipe that only this process holds: if this process dies
    in any way, `cat` and ssh end too. (`ssh -N` would go on for ever.)
    """

    def __init__(self, ssh: Ssh, remote_port: int, *, local_port: int | None = None) -> None:
        """
        Args:
            remote_port: port on the loopback (127.0.0.1) of the other machine.
            local_port: port on the loopback of this machine; by default a free one.
        """
        self.ssh = ssh
        self.remote_port = remote_port
        self.local_port = local_port or free_port()
        self.num_opened = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address on this machine at which the server of the other machine answers."""
        return f"http://127.0.0.1:{self.local_port}"

    @property
    def is_open(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @retry(NUM_TRIES, delay=0.5, backoff_factor=1.0, exceptions=(UnreachableError,))
    async def open(self) -> None:
        """Open the tunnel, also again after it broke.

        Raises:
            ConfigError: there is no ssh program.
            MachineError, UnreachableError: it cannot be opened. It is closed then.
        """
        command = self.ssh.base_command(
            "-o", "ControlPath=none",  # a shared connection would keep the local port when this process ends
            "-o", "ExitOnForwardFailure=no",  # ports of the user's configuration may be held by a terminal
            "-L", f"127.0.0.1:{self.local_port}:127.0.0.1:{self.remote_port}",
        )  # fmt: skip
        self.close()
        try:
            socket.create_server(("127.0.0.1", self.local_port)).close()
        except OSError as error:
            raise MachineError(
                f"port {self.local_port} of this machine is in use, perhaps by another `art launch tunnel`; end what "
                "uses it, or choose another port"
            ) from error
        with tempfile.TemporaryFile() as errors:
            # A new session: Ctrl-C in the terminal reaches only this process, which then closes the tunnel.
            process = self._process = subprocess.Popen(  # noqa: ASYNC220  # a thread waits for it
                [*command, in_sh(f"echo {_OPEN}; exec cat > /dev/null")], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip

            def until_open() -> bool:
                assert process.stdout is not None  # start files of the shell may print, too
                return any(line.rstrip().endswith(_OPEN.encode()) for line in process.stdout)

            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    if not await asyncio.to_thread(until_open):
                        code = process.wait()
                        errors.seek(0)
                        raise self.ssh.explain(errors.read().decode(errors="replace") or describe_exit(code))
            except BaseException as error:
                self.close()
                if isinstance(error, TimeoutError):
                    raise UnreachableError(f"no tunnel to {self.ssh.host} within {OPEN_TIMEOUT_S:.0f} s") from None
                raise
        self.num_opened += 1

    def close(self) -> None:
        """End the tunnel's process."""
        process, self._process = self._process, None
        end_process(process)
        if process is not None:
            process.communicate()


def free_port() -> int:
    """Return a port of this machine's loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def in_sh(script: str) -> str:
    """Return the command that runs a script of one line in `sh`, whatever the login shell of the account is."""
    return f"exec sh -c {shlex.quote(script)}"


def shell_path(path: str) -> str:
    """Quote a path for the shell of the other machine. A leading `~/` means the home directory there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


async def run_process(
    command: Sequence[str], *, timeout_s: float, input: bytes = b"", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program in a session of its own, with further options of `Popen`, and wait for its end.

    A thread talks to it: asyncio would wait for ever for the pipes of a process that was cancelled at its start.

    Raises:
        UnreachableError: it did not end in time, and was killed with all that it had started.
    """
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(  # noqa: ASYNC220  # a thread waits for it
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, **options
        )  # fmt: skip
        try:
            async with asyncio.timeout(timeout_s):
                stdout, _ = await asyncio.to_thread(process.communicate, input)
        except TimeoutError:
            raise UnreachableError(f"`{shlex.join(command)[-120:]}` did not end within {timeout_s:.0f} s") from None
        finally:
            end_process(process)
        stderr.seek(0)
        texts = [output.decode(errors="replace") for output in (stdout, stderr.read())]
        return subprocess.CompletedProcess(command, process.returncode, *texts)


def end_process(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a process that was started in a session of its own, with all that it started, if it still runs."""
    if process is not None and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg"):  # Windows has no process groups; there only the process itself is killed
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
