"""`Ssh`: one machine, reached by the system's OpenSSH client.

The client reads the user's `~/.ssh/config`, agent and known hosts as in a terminal. It never asks a question: what a
terminal would ask (a password, an unknown host key) is an error here, which says what to do.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from art.errors import ConfigError, MachineError, UnreachableError

CONNECT_TIMEOUT_S = 15
ALIVE_INTERVAL_S, ALIVE_COUNT = 5, 4
"""A connection over which nothing comes back for interval times count, 20 seconds, counts as broken."""
_SETTINGS = {
    "BatchMode": "yes",
    "ConnectTimeout": CONNECT_TIMEOUT_S,
    "ServerAliveInterval": ALIVE_INTERVAL_S,
    "ServerAliveCountMax": ALIVE_COUNT,
    "ControlMaster": "no",  # a connection of ours that a terminal shares would last as long as that terminal
    "RemoteCommand": "none",  # ssh refuses a command beside one of the configuration, such as `tmux attach`
    "LogLevel": "INFO",  # a quieter configuration would hide why a connection fails
}
"""Options of every ssh process. They win over those of the user's configuration."""
NO_FORWARDS = ("-o", "ClearAllForwardings=yes")
"""Options of a command: ports of the user's configuration are for a terminal, which may hold them already."""
EXIT_OF_SSH = 255
"""Exit code by which OpenSSH says that it failed itself, and not the command on the other machine."""
SHOWN_STDERR = 600
"""Number of characters of an error output that a message quotes."""


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command on the other machine ended, and what it wrote."""

    rc: int
    stdout: str
    stderr: str


class Ssh:
    """One machine and account that commands run on."""

    def __init__(
        self,
        host: str,
        user: str | None = None,
        port: int | None = None,
        identity: str | Path | None = None,
        config: str | Path | None = None,
    ) -> None:
        """
        Args:
            host: a name or address, `user@name`, or an alias of `~/.ssh/config`.
            user: account there; by default that of `host`, or what OpenSSH's configuration says.
            port: port of the ssh server; by default what OpenSSH's configuration says.
            identity: file of the private key, which is then the only one that is tried.
            config: configuration file in place of `~/.ssh/config`.

        Raises:
            ConfigError: the host is no name or address, the port is no number of a port, or two users are given.
        """
        named, _, bare = host.rpartition("@")
        is_user = not named or re.fullmatch(r"[\w.+\\]\S*", named)
        if not re.fullmatch(r"[\w.:%\[\]][\w.:%\[\]-]*", bare) or not is_user:
            raise ConfigError(f'a host is a name like "gpu-box" or "alice@gpu-box", got {host!r}', param="host")
        if named and user and named != user:
            raise ConfigError(
                f"the host {host!r} names another user than user={user!r}; give one of them", param="user"
            )
        if port is not None and not 0 < port < 65536:
            raise ConfigError(f"the port of an ssh server is a number from 1 to 65535, got {port}", param="port")
        self.host = bare
        self.user = user or named or None
        self.port = port
        self.identity = Path(identity).expanduser() if identity else None
        self.config = Path(config).expanduser() if config else None

    @property
    def name(self) -> str:
        """The machine as a person would write it: `alice@gpu-box`, with `:2222` for an unusual port."""
        return (f"{self.user}@" if self.user else "") + self.host + (f":{self.port}" if self.port else "")

    def terminal_command(self) -> str:
        """The command line by which a person connects to the machine, to put into messages."""
        return shlex.join(["ssh", *self._place_options(), self.host])

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
        return [program, "-T", *pairs, *self._place_options(), *options, "--", self.host]

    def _place_options(self) -> list[str]:
        options = []
        if self.config is not None:
            options += ["-F", str(self.config)]
        if self.identity is not None:
            options += ["-i", str(self.identity), "-o", "IdentitiesOnly=yes"]
        if self.port is not None:
            options += ["-p", str(self.port)]
        if self.user is not None:
            options += ["-l", self.user]
        return options

    async def run(
        self,
        command: str,
        *,
        input: bytes | None = None,
        timeout_s: float,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:
        """Run a command, and wait for its end.

        Args:
            command: a script for `sh`. It can be seen by others in lists of processes, so secrets belong into `input`.
            input: standard input of the command.
            timeout_s: seconds after which the connection is ended.
            on_line: called with each line of standard output as it comes.

        Raises:
            ConfigError: there is no ssh program.
            UnreachableError: the machine cannot be reached now, or the command did not end in time.
            MachineError: the machine refuses the connection: unknown host key, no permission.
        """
        process = await start_process(*self.base_command(*NO_FORWARDS), in_sh(command), stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(timeout_s):
                _, stdout, stderr, _ = await asyncio.gather(
                    feed(process.stdin, input or b""), read_lines(process.stdout, on_line), process.stderr.read(),
                    process.wait(),
                )  # fmt: skip
        except TimeoutError:
            what = command if len(command) < 80 else f"{command[:77]}..."
            raise UnreachableError(f"{self.name} did not finish `{what}` within {timeout_s:.0f} s") from None
        finally:
            await end_process(process)
        errors = stderr.decode(errors="replace")
        if process.returncode == EXIT_OF_SSH:
            raise self.explain(errors)
        return Completed(process.returncode or 0, stdout, errors)

    async def put(self, content: bytes, path: str, *, timeout_s: float = 120.0) -> None:
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
        done = await self.run(script, input=content, timeout_s=timeout_s)
        if done.rc != 0:
            raise MachineError(f"{self.name}: writing {path} failed: {done.stderr.strip()[-SHOWN_STDERR:]}")

    def explain(self, errors: str) -> MachineError:
        """Make the error for what OpenSSH wrote when it failed."""
        text = errors.strip()[-SHOWN_STDERR:].removeprefix("ssh: ") or "it gave no reason"
        how = self.terminal_command()
        for pattern, advice in _REFUSALS.items():
            if re.search(pattern, text, re.IGNORECASE):
                return MachineError(f"{self.name}: {advice.format(how=how)} (ssh: {text})")
        return UnreachableError(f"{self.name} cannot be reached over ssh; does `{how}` work? (ssh: {text})")


_REFUSALS = {
    r"REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "its host key is another one than before. Find out why; if the machine was set up again, remove the old key "
        "with `ssh-keygen -R HOST`, then connect once with `{how}`"
    ),
    r"Host key verification failed|authenticity of host": (
        "its host key is not known here. Connect once in a terminal with `{how}`, and compare the fingerprint that it "
        "shows with the machine's own before you accept it"
    ),
    r"Identity file .* not accessible|Load key .*: (?:invalid|bad|error|Permission)|bad permissions": (
        "the file of the private key cannot be used"
    ),
    r"Permission denied \(|Too many authentication failures|No supported authentication methods": (
        "it does not let you in. Keys of an agent and key files without a passphrase work here, passwords do not: "
        "add the key with `ssh-add`, or copy it there with `ssh-copy-id`. `{how}` must work without a question"
    ),
    r"Could not resolve hostname": "no machine has this name; correct it, or add it to ~/.ssh/config",
    r"Bad configuration option|terminating, \d+ bad configuration": "the configuration file of ssh is wrong",
}
"""What a user can do, by what OpenSSH writes. These errors stay until somebody acts; all others may pass."""


def in_sh(script: str) -> str:
    """Return the command that runs a script of one line in `sh`, whatever the login shell of the account is."""
    return f"exec sh -c {shlex.quote(script)}"


def shell_path(path: str) -> str:
    """Quote a path for the shell of the other machine. A leading `~/` means the home directory there."""
    if path == "~":
        return '"$HOME"'
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


async def feed(stdin: asyncio.StreamWriter, content: bytes) -> None:
    """Write the input of a command, and end it. A command that takes no more of it is no error here."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the command's exit code says why
        if not stdin.is_closing():  # a command that has ended already; uvloop refuses to write to it
            stdin.write(content)
            await stdin.drain()
    stdin.close()


async def read_lines(stdout: asyncio.StreamReader, on_line: Callable[[str], None] | None) -> str:
    """Read all that a process prints, and call `on_line` with each line as it comes. A line may have any length."""
    content, start = bytearray(), 0
    while piece := await stdout.read(1 << 16):
        content += piece
        while on_line is not None and (end := content.find(b"\n", start)) >= 0:
            on_line(content[start:end].decode(errors="replace"))
            start = end + 1
    if on_line is not None and start < len(content):
        on_line(content[start:].decode(errors="replace"))
    return content.decode(errors="replace")


async def start_process(
    *command: str, stdin: int, cwd: str | None = None, env: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start a process in a session of its own, with pipes for what it prints.

    A cancellation takes effect when the process has started, and ends it. asyncio would end the process alone, and wait
    for ever for pipes that it has not connected yet.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command, stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, cwd=cwd, env=env,
        )
    )  # fmt: skip
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await end_process(await starting)
        raise


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Kill a process that was started with `start_new_session`, with all that it started, and close its pipes.

    Waiting for a killed process alone can take for ever: asyncio also waits for its pipes, which a helper that it
    started (a ProxyCommand of ssh) may hold.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg"):  # Windows has no process groups; there only the process itself is killed
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
    process._transport.close()  # type: ignore[attr-defined]  # asyncio has no public name for it
    await process.wait()
