"""`SshBackend`: an ART server on any machine that ssh reaches, used from here.

Everything of one server is in one folder there. Shell scripts install ART into it, and start and stop the server. Every
one is safe to repeat, after a lost connection too. Scripts with a secret are read from standard input, where no other
user sees them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import io
import json
import logging
import re
import secrets
import shlex
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from art.backend import Backend
from art.client.client import ServerClient
from art.client.terminal import ProgressLine, above_progress
from art.config import ServerConfig
from art.errors import ArtError, ConfigError, MachineError
from art_cloud.ssh import SHOWN_STDERR, Ssh, Tunnel, shell_path

logger = logging.getLogger(__name__)

PACKAGE = "agent-reinforcement-trainer"
_PARTS_OF_SOURCE = ("pyproject.toml", "README.md", "LICENSE", "src")
"""What pip needs of a checkout to build ART."""
INSTALL_TIMEOUT_S = 3600.0
PING_EVERY_S, PING_TIMEOUT_S, LOOK_EVERY_S = 2.0, 4.0, 0.1
NUM_SILENT = 2
"""Number of pings in a row without an answer after which the server is started again, unless it runs."""
NUM_FOUND_SILENT = 5
"""Number of times in a row that a server runs and gives no answer, after which it is killed and starts again."""
PAUSE_S = 5.0
"""Pause before another try to start a server again that could not be started."""


@dataclass(frozen=True, slots=True)
class Install:
    """What is installed on another machine, and where."""

    source: str | Path | None = None
    """`"index"` for the release of this version; `"installed"` for what is there already; a folder of ART's source on
    this machine; anything else is what pip is asked for, such as `agent-reinforcement-trainer[local]==0.1.0`.
    `None`: the checkout that this process runs from, or else the release of its version."""
    extras: tuple[str, ...] = ("local",)
    """Optional parts of ART, such as `("local", "vllm")`."""
    python: str = "python3"
    """Python 3.11 or newer of the other machine, a name or a path."""
    folder: str | None = None
    """Folder of the server on the other machine, for its environment, settings and data; absolute, or beginning with
    `~/`. By default `~/.art/servers/NAME`."""

    def package(self) -> tuple[str, bytes]:
        """Return what pip is asked for, and the packed source that is sent for that; empty if pip fetches all.

        Raises:
            ConfigError: the source is a path where there is no source of ART.
        """
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        checkout = Path(__file__).parents[2]
        source = self.source or (checkout if (checkout / "pyproject.toml").is_file() else "index")
        if source == "index":
            return f"{PACKAGE}{extras}=={importlib.metadata.version(PACKAGE)}", b""
        path = Path(source).expanduser()
        if all((path / part).exists() for part in _PARTS_OF_SOURCE):
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w:") as files:
                for part in _PARTS_OF_SOURCE:
                    files.add(path / part, part, filter=_plain)  # with its files in the order of their names
            return f"./source{extras}", packed.getvalue()
        if isinstance(source, Path) or "/" in source or "\\" in source:
            raise ConfigError(f"there is no source of ART at {str(source)!r}", param="source")
        return source, b""


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Make the entry of a file such that the same files always give the same bytes."""
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if "__pycache__" in entry.name else entry


_INSTALL = """\
set -e; umask 077; mkdir -p FOLDER; cd FOLDER;
if command -v flock > /dev/null; then exec 9> install.lock; flock 9; fi;
[ "$(cat installed 2> /dev/null)" != DIGEST ] || [ ! -x venv/bin/python ] || exit 0;
rm -f installed;
if [ ! -x venv/bin/python ]; then
  PYTHON -c "import sys; sys.exit(sys.version_info < (3, 11))" ||
    { echo "PYTHON is not Python 3.11 or newer; install one, or name it by python=" >&2; exit 1; };
  PYTHON -m venv --clear venv || { rm -rf venv; exit 1; };
fi;
case TARGET in ./source*) rm -rf source; mkdir source; tar -xf - -C source;; esac;
venv/bin/python -m pip install --no-input --disable-pip-version-check --progress-bar off TARGET;
printf %s DIGEST > installed
"""
"""A script for any POSIX shell, whose lines are joined to one. It reads the packed source from its input."""
_ENTER = """\
umask 077
cd FOLDER 2> /dev/null && [ -x venv/bin/python ] || exit 127
lock() { venv/bin/python -ISc 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2> /dev/null; }
is_running() { exec 9>> keeper.lock; if lock; then exec 9>&-; return 1; else exec 9>&-; fi; }
"""
"""Start of the scripts below. The keeper and its server hold the lock of the folder."""
_START = """\
exec 9>> keeper.lock
if lock || { sleep 0.3; lock; } || { sleep 1; lock; }; then  # who asks for the state holds it for a moment
  [ -s api.key ] || printf %s API_KEY > api.key
  [ -f settings.json ] || echo "{}" > settings.json
  [ -z CONFIG ] || printf %s CONFIG > settings.json
  mkdir -p data/logs; rm -f data/logs/address.txt key.pipe; mkfifo key.pipe
  cat > keeper.sh << 'END'
cd "$(dirname "$0")"; port=0
[ ! -f environment.sh ] || . ./environment.sh
exec 8<> key.pipe  # the server ends when this process does: nobody else holds the end that is written to
while rm -f data/logs/address.txt; do
  log=data/logs/server.log; [ -z "$(find $log -size +20000k 2> /dev/null)" ] || mv $log $log.old
  { cat api.key; echo; } >&8
  venv/bin/python -m art.cli.server --data-dir data --config-json "$(cat settings.json)" --port $port \
    --key-from-stdin --die-with-parent < key.pipe 8>&- >> $log 2>&1
  status=$?
  if [ -f data/logs/address.txt ]; then port=$(sed 's/.*://' data/logs/address.txt)
  elif [ $status -lt 128 ]; then exit; fi  # it has a reason, which is in its log; one that was killed has none
  sleep 1
done
END
  nohup sh "$PWD/keeper.sh" < /dev/null >> keeper.log 2>&1 &
  echo $! > keeper.pid
fi
exec 9>&-
tries=0
until [ -f data/logs/address.txt ] || ! is_running || [ $tries = 400 ]; do sleep 0.25; tries=$((tries + 1)); done
[ -f data/logs/address.txt ] || tail -n 20 data/logs/server.log keeper.log >&2
"""
_STOP = """\
tries=0
while is_running; do
  [ $tries != 0 ] || kill "$(cat keeper.pid)"
  [ $tries != 160 ] || kill -9 "$(cat data/server.lock)"
  [ $tries != 200 ] || { echo "the server does not end" >&2; exit 1; }
  sleep 0.25; tries=$((tries + 1))
done
"""
_STATUS = """\
running=0; port=0
if is_running; then running=1; port=$(sed 's/.*://' data/logs/address.txt 2> /dev/null || echo 0); fi
version=$(venv/bin/python -c 'import art; print(art.__version__)' 2> /dev/null)
exec 2> /dev/null; echo "answer $running|$port|$version|$(cat installed)|$(cat api.key)|$(cat settings.json)"
"""


@dataclass(frozen=True, slots=True)
class RemoteServerState:
    """What the other machine says about a server."""

    is_running: bool
    """Whether the keeper runs, a shell that starts the server again whenever it dies."""
    port: int
    """Port on the loopback of the other machine; 0 while it starts."""
    failure: str
    """End of the log of a server that did not start."""
    version: str
    digest: str
    """Digest of what was installed."""
    config: dict[str, Any] = field(default_factory=dict)
    api_key: str = field(default="", repr=False)


class SshBackend(Backend):
    """Trains and serves on another machine that needs ssh and Python only, and a GPU for models of some size.

    The first use installs ART there, into a folder of the account, starts `art-server` on the machine's loopback, and
    opens a tunnel to it. The server is started again whenever it dies, and the tunnel whenever it breaks. Closing the
    backend ends the tunnel; the server goes on with its jobs, and the next `SshBackend` of the same host and name finds
    it.
    """

    shares_files = False

    local_port: int | None = None
    """Port of this machine for the tunnel; by default a free one. Set it before the first use."""

    def __init__(
        self,
        host: str | Ssh,
        *,
        name: str = "default",
        install: Install | None = None,
        server_config: ServerConfig | None = None,
    ) -> None:
        """
        Args:
            host: `user@machine`, an alias of `~/.ssh/config`, or an `Ssh` with a configuration file of its own.
            name: name of the server among those of the account, each with its own environment and data directory; of
                letters, digits, `-` and `_`.
            install: what is installed, and where; by default what this process runs, with the extra `local`.
            server_config: settings of the server, which chooses a free port of its loopback itself. A server that
                already runs must have been started with the same.

        Raises:
            ConfigError: the host, the name, the folder or a setting is malformed.
        """
        super().__init__()
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
            raise ConfigError(f"a server's name has letters, digits, - and _ only, got {name!r}", param="name")
        if server_config is not None and server_config.model_fields_set & {"host", "port"}:
            raise ConfigError("the server listens on a free port of its loopback; host and port cannot be set")
        self.ssh = host if isinstance(host, Ssh) else Ssh(host)
        self.install = install or Install()
        self.server_folder = (self.install.folder or f"~/.art/servers/{name}").rstrip("/")
        if not self.server_folder.startswith(("/", "~/")) or len(self.server_folder) < 4:
            raise ConfigError(f"folder must be absolute or begin with ~/, got {self.server_folder!r}", param="folder")
        self.server_data_dir = f"{self.server_folder}/data"
        self.server_settings = server_config and server_config.model_dump(mode="json", exclude_unset=True)
        """Settings that the server is started with; `None`: those of before."""
        self.tunnel: Tunnel | None = None
        """The tunnel; `None` before the first use and after `close`."""
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._watcher: asyncio.Task[None] | None = None

    async def open(self) -> ServerClient:
        """Install, start and connect now, rather than with the first use. Returns a client of the server.

        Raises:
            ConfigError: there is no ssh program, or the server runs with other settings.
            MachineError, UnreachableError: the machine does not let us in, or ART cannot be installed or started there.
        """
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            if self._client is None:
                await self._find_machine()
                state = await self.start_server()
                tunnel = Tunnel(self.ssh, state.port, local_port=self.local_port)
                client = ServerClient(tunnel.url, state.api_key)
                try:
                    await tunnel.open()
                    await client.health()
                except BaseException:
                    await client.close()
                    tunnel.close()
                    raise
                self._client, self.tunnel, self.local_port = client, tunnel, tunnel.local_port
                say(f"{self.ssh.host}: ready at {self._client.base_url} (data in {self.server_data_dir})")
            if self._watcher is None or self._watcher.done() or not self._watcher.get_loop().is_running():
                self._watcher = loop.create_task(self._keep_alive(), name="ssh-backend")
            return self._client

    _connection = open

    async def _find_machine(self) -> None:
        """Make sure that the machine of `self.ssh` exists. One that ssh reaches does; a subclass rents it."""

    @property
    def kept_data(self) -> str:
        """Where the data directory is after `down`, in words."""
        return f"{self.server_data_dir} on {self.ssh.host}"

    async def _keep_alive(self) -> None:
        """Open the tunnel again when it breaks, and start the server again when it does not answer.

        Clients repeat the requests that were running.
        """
        num_silent = num_found = 0
        while (client := self._client) is not None and (tunnel := self.tunnel) is not None:
            deadline = time.monotonic() + PING_EVERY_S
            while tunnel.is_open and time.monotonic() < deadline:
                await asyncio.sleep(LOOK_EVERY_S)
            try:
                if not tunnel.is_open:
                    logger.warning("the tunnel to %s broke and is opened again", self.ssh.host)
                    await tunnel.open()
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await client.health()
                num_silent = num_found = 0
                continue
            except (TimeoutError, ArtError):
                num_silent += 1
            if num_silent >= NUM_SILENT:
                try:
                    if num_found == NUM_FOUND_SILENT:
                        await self._ask('kill -9 "$(cat data/server.lock)"\n')  # its keeper starts it again
                    port = (await self._start()).port
                    num_found = num_found % NUM_FOUND_SILENT + 1
                    if port != tunnel.remote_port:
                        tunnel.remote_port = port
                        tunnel.close()
                    num_silent = 0
                except ArtError as error:
                    logger.warning("the server on %s is away: %s", self.ssh.host, error)
                    await asyncio.sleep(PAUSE_S)

    async def stop(self) -> None:
        """Close the backend and stop the server. Its data stays; the next use starts it again, and its jobs go on.

        Raises:
            MachineError: the server does not end.
        """
        await self.close()
        await self.stop_server()

    async def down(self, *, delete_data: bool = False) -> bool:
        """Close the backend, stop the server, and delete its environment, key and settings.

        Args:
            delete_data: whether to delete its data directory too: all models, checkpoints and logs of this server.

        Returns:
            whether there is data that stays.

        Raises:
            MachineError: the server does not end, or something cannot be deleted.
        """
        await self.close()
        say(f"{self.ssh.host}: deleting {self.server_folder}{'' if delete_data else ', except its data'}")
        with ProgressLine(f"{self.ssh.host}: stopping art-server"):
            await self.stop_server()
        folder = shell_path(self.server_folder)
        script = (
            f"cd {folder} 2> /dev/null || exit 0\nrm -rf venv source installed api.key settings.json environment.sh "
            f"keeper.* install.lock key.pipe {'data' if delete_data else ''} || exit 1\n"
            f"cd / && rmdir {folder} 2> /dev/null\n[ -d {folder}/data ] && echo data stays\nexit 0\n"
        )
        done = await self.ssh.run("sh -s", input=script.encode(), timeout_s=600)
        if done.returncode != 0:  # a login shell may print something even if all went well
            said = done.stderr.strip()[-SHOWN_STDERR:]
            raise MachineError(f"{self.ssh.host}: deleting {self.server_folder} failed: {said}")
        return "data stays" in done.stdout

    async def close(self) -> None:
        """Close all connections and the tunnel. The server goes on."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher.get_loop() is asyncio.get_running_loop():
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        try:
            await super().close()
        finally:
            self._client = None
            tunnel, self.tunnel = self.tunnel, None
            if tunnel is not None:
                tunnel.close()

    async def start_server(self) -> RemoteServerState:
        """Return the state of the server, which is installed and started if it does not run.

        Raises:
            ConfigError: it runs with other settings than were asked for.
            MachineError: it cannot be installed or started; the message says why.
        """
        state = await self.server_status()
        if state is None or not state.is_running:
            await self._install(state)
            say(f"{self.ssh.host}: starting art-server in {self.server_folder}")
        state = await self._start()
        if self.server_settings not in (None, state.config):
            raise ConfigError(
                f"the server in {self.server_folder} on {self.ssh.host} runs already, with other settings: "
                f"{state.config} instead of {self.server_settings}. Stop it first (`art launch stop`, or `stop()` of "
                "its backend), or choose another name"
            )
        return state

    async def stop_server(self) -> None:
        """End the server and its keeper, and wait for their end; a `MachineError` if they do not end."""
        await self._ask(_STOP)

    async def _install(self, state: RemoteServerState | None) -> None:
        """Install ART into an environment of the server's folder, unless `state` says that it is there."""
        if self.install.source == "installed":
            return
        target, source = self.install.package()
        digest = hashlib.sha256(target.encode() + b"\0" + source).hexdigest()
        if state is not None and state.digest == digest:
            return
        say(f"{self.ssh.host}: installing {target} into {self.server_folder}/venv (minutes, the first time)")
        values = {"DIGEST": digest, "TARGET": shlex.quote(target), "PYTHON": shell_path(self.install.python)}
        script = self._fill(" ".join(_INSTALL.split("\n")), values)
        with ProgressLine(f"{self.ssh.host}: installing"):
            done = await self.ssh.run(script, input=source, timeout_s=INSTALL_TIMEOUT_S)
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip()[-SHOWN_STDERR:]
            raise MachineError(f"{self.ssh.host}: installing ART into {self.server_folder} failed:\n{said}")

    async def _start(self) -> RemoteServerState:
        """Start the installed server, and return when it answers. If it runs, only its state is returned.

        The API key is made here when the server is first started, and is kept on the other machine for later starts.
        """
        with ProgressLine(f"{self.ssh.host}: starting art-server"):
            state = await self._ask(_START)
        if state is None:
            raise MachineError(
                f"nothing is installed in {self.server_folder} on {self.ssh.host}; `art launch` installs ART there"
            )
        if not state.port or not state.is_running:
            raise MachineError(f"art-server does not start on {self.ssh.host}: {state.failure or 'no answer'}")
        return state

    async def server_status(self) -> RemoteServerState | None:
        """Return the state of the server; `None` if nothing is installed in its folder."""
        return await self._ask()

    async def _ask(self, script: str = "") -> RemoteServerState | None:
        """Run a script in the server's folder; returns the state afterwards, `None` if nothing is installed."""
        config = "" if self.server_settings is None else json.dumps(self.server_settings)
        values = {"CONFIG": shlex.quote(config), "API_KEY": f"art-{secrets.token_urlsafe(24)}"}
        done = await self.ssh.run("sh -s", input=self._fill(_ENTER + script + _STATUS, values).encode())
        if done.returncode == 127:
            return None
        errors = done.stderr.strip()[-SHOWN_STDERR:]
        # A greeting of the login shell may come first, even on the same line.
        answer = re.search(r"answer (\d)\|(\d*)\|([^|]*)\|([^|]*)\|([^|]*)\|(.*)$", done.stdout, re.MULTILINE)
        if answer is None:
            raise MachineError(f"{self.ssh.host}: a script in {self.server_folder} failed: {errors}")
        is_running, port, version, digest, api_key, settings = answer.groups()
        return RemoteServerState(
            is_running=is_running == "1", port=int(port or 0), failure="" if is_running == "1" else errors,
            version=version, digest=digest, config=json.loads(settings or "{}"), api_key=api_key,
        )  # fmt: skip

    def _fill(self, script: str, values: dict[str, str]) -> str:
        """Put the server's folder and values, which are quoted for a shell, into a script in place of their names."""
        values = {"FOLDER": shell_path(self.server_folder)} | values
        return re.sub("|".join(values), lambda word: values[word[0]], script)


def say(line: str) -> None:
    """Tell about a long step on standard error."""
    with above_progress():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
