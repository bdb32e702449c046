"""`RemoteServer`: an `art-server` on another machine: installed, started, asked, stopped, removed.

Everything of one server is in one folder there. A shell script installs ART into it; after that `keeper.py`, which
comes with ART, does the work there. Every command is safe to repeat, after a lost connection too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import secrets
import shlex
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from art.backends.ssh.ssh import SHOWN_STDERR, Completed, Ssh, shell_path
from art.config import ServerConfig
from art.errors import ConfigError, MachineError, UnreachableError
from art.utils.retry import retry

PACKAGE = "agent-reinforcement-trainer"
_PARTS_OF_SOURCE = ("pyproject.toml", "README.md", "LICENSE", "src")
"""What pip needs of a checkout to build ART."""
COMMAND_TIMEOUT_S, INSTALL_TIMEOUT_S = 150.0, 3600.0
NUM_TRIES = 5
"""How often a command is sent again whose connection broke."""
RETRY_DELAY_S = 0.5
PROGRESS_EVERY_S = 5.0
Progress = Callable[[str], None]
"""Called with a line about each long step."""


@dataclass(frozen=True, slots=True)
class Install:
    """What is installed on another machine, and where."""

    source: str | Path | None = None
    """`"index"` for the release of this version; `"installed"` for what is there already; a wheel or a folder of ART's
    source on this machine; anything else is what pip is asked for, such as `agent-reinforcement-trainer[local]==0.1.0`.
    `None`: what this process runs."""
    extras: tuple[str, ...] = ("local",)
    """Optional parts of ART, such as `("local", "vllm")`."""
    python: str | None = None
    """Python 3.11 or newer of the other machine, a name or a path. By default the first one that is found; if there is
    none, uv downloads one into the folder."""
    folder: str | None = None
    """Folder of the server on the other machine, for its environment, settings and data; absolute, or beginning with
    `~/`. By default `~/.art/servers/NAME`."""

    def package(self) -> tuple[str, tuple[str, bytes] | None]:
        """Return what pip is asked for, and the file, with its name, that is sent over first.

        Raises:
            ConfigError: the source is a path where there is no wheel and no source of ART, or an extra is malformed.
        """
        if wrong := [extra for extra in self.extras if not re.fullmatch(r"[A-Za-z0-9-]+", extra)]:
            raise ConfigError(f'extras are names like "local", got {wrong[0]!r}', param="extras")
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        source = _own_source() if self.source is None else self.source
        if source == "index":
            return f"{PACKAGE}{extras}=={importlib.metadata.version(PACKAGE)}", None
        path = Path(source).expanduser()
        if path.suffix == ".whl" and path.is_file():
            return f"./{path.name}{extras}", (path.name, path.read_bytes())
        if all((path / part).exists() for part in _PARTS_OF_SOURCE):
            return f"./source{extras}", ("source.tar", _pack_source(path))
        if isinstance(source, Path) or "/" in source or "\\" in source:
            raise ConfigError(f"there is no wheel and no source of ART at {str(source)!r}", param="source")
        return source, None


def _own_source() -> str | Path:
    """The folder or wheel that the ART of this process came from; `"index"` if it came from a package index."""
    checkout = Path(__file__).parents[4]
    if (checkout / "pyproject.toml").is_file() and PACKAGE in (checkout / "pyproject.toml").read_text(encoding="utf-8"):
        return checkout
    try:
        origin = importlib.metadata.distribution(PACKAGE).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    url = urlsplit(json.loads(origin)["url"] if origin else "")
    path = Path(url2pathname(url.path))
    return path if url.scheme == "file" and path.exists() else "index"


def _pack_source(folder: Path) -> bytes:
    """Pack ART's source, such that the same files always give the same bytes."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return None if "__pycache__" in entry.name else entry

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:") as files:
        for part in _PARTS_OF_SOURCE:
            files.add(folder / part, part, filter=plain)  # with its files in the order of their names
    return packed.getvalue()


_INSTALL = """\
set -e
umask 077
mkdir -p FOLDER
cd FOLDER
if command -v flock > /dev/null; then exec 9> install.lock; flock 9; fi
[ "$(cat installed 2> /dev/null)" != DIGEST ] || [ ! -x venv/bin/python ] || exit 0
rm -f installed
if [ ! -x venv/bin/python ]; then
  for candidate in PYTHONS; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || continue
    python=$candidate
    break
  done
  if [ -z "$python" ]; then
    echo "Installing Python 3.12 with uv, since there is no Python 3.11 or newer"
    python3 -m pip install --quiet --target uv uv
    export UV_PYTHON_INSTALL_DIR="$PWD/python"
    uv/bin/uv python install 3.12
    python=$(uv/bin/uv python find --no-project 3.12)
  fi
  "$python" -m venv --clear venv || { rm -rf venv; exit 1; }
fi
if [ -e source.tar ]; then rm -rf source; mkdir source; tar -xf source.tar -C source; rm source.tar; fi
venv/bin/python -m pip install --no-input --disable-pip-version-check --progress-bar off TARGET
printf %s DIGEST > installed
"""
"""A script for any POSIX shell."""
_FILES = (
    "venv", "python", "uv", "source", "source.tar*", "*.whl", "installed", "api.key", "settings.json", "state.json",
    "environment.json", "*.lock", "keeper.log",
)  # fmt: skip
"""What is in the folder besides its data."""
_PYTHONS = 'python3 python3.13 python3.12 python3.11 "$HOME"/.local/bin/python3.1[1-9] /opt/conda/bin/python'


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the other machine says about a server."""

    is_running: bool
    """Whether the keeper runs, which restarts the server whenever it dies."""
    port: int
    """Port on the loopback of the other machine; 0 before the first answer."""
    failure: str
    """Why the keeper has given up; empty if it has not."""
    version: str
    """Version of the ART that is installed."""
    digest: str
    """Digest of what was installed."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings that the server was started with."""
    api_key: str = field(default="", repr=False)


class RemoteServer:
    """One server on another machine, by its name there."""

    def __init__(
        self, ssh: Ssh, *, name: str = "default", install: Install | None = None, config: ServerConfig | None = None
    ) -> None:
        """
        Args:
            name: name of the server, of letters, digits, `-` and `_`; several servers of an account differ in it.
            config: settings of the server. It chooses a free port of its machine's loopback itself.

        Raises:
            ConfigError: the name or the folder is malformed, or the config names a host or port.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
            raise ConfigError(f"a server's name has letters, digits, - and _ only, got {name!r}", param="name")
        if config is not None and config.model_fields_set & {"host", "port"}:
            raise ConfigError("the server listens on a free port of its loopback; host and port cannot be set")
        self.ssh = ssh
        self.install_settings = install or Install()
        self.folder = (self.install_settings.folder or f"~/.art/servers/{name}").rstrip("/")
        if not self.folder.startswith(("/", "~/")) or len(self.folder) < 4:
            raise ConfigError(f"folder must be absolute or begin with ~/, got {self.folder!r}", param="folder")
        self.settings = None if config is None else config.model_dump(mode="json", exclude_unset=True)
        """Settings that the server is started with; `None`: those of before."""

    @property
    def data_dir(self) -> str:
        """Data directory on the other machine."""
        return f"{self.folder}/data"

    async def ensure(self, progress: Progress) -> ServerState:
        """Return the state of the server, which is installed and started if it does not run.

        Raises:
            ConfigError: it runs with other settings than were asked for.
            MachineError: it cannot be installed or started; the message says why.
        """
        state = await self.status()
        if state is None or not state.is_running:
            await self.install(progress, state)
            progress(f"{self.ssh.host}: starting art-server in {self.folder}")
        elif self.settings is not None and self.settings != state.config:
            raise ConfigError(
                f"the server in {self.folder} on {self.ssh.host} runs already, with other settings: {state.config} "
                f"instead of {self.settings}. Stop it first (`art launch stop`, or `stop()` of its backend), or "
                "choose another name"
            )
        return await self.start()

    async def install(self, progress: Progress, state: ServerState | None) -> None:
        """Install ART into an environment of the server's folder, unless `state` says that it is there.

        Raises:
            MachineError: there is no Python, too little space, or pip failed.
        """
        install, name = self.install_settings, self.ssh.host
        if install.source == "installed":
            if state is None:
                raise MachineError(f"nothing is installed in {self.folder} on {name}; `art launch` installs ART there")
            return
        target, file = install.package()
        digest = hashlib.sha256(target.encode() + b"\0" + (file[1] if file else b"")).hexdigest()
        if state is not None and state.digest == digest:
            return
        progress(f"{name}: installing {target} into {self.folder}/venv (minutes, the first time)")
        if file is not None:
            await self.ssh.put(file[1], f"{self.folder}/{file[0]}")
        values = {
            "FOLDER": shell_path(self.folder), "DIGEST": digest, "TARGET": shlex.quote(target),
            "PYTHONS": shell_path(install.python) if install.python else _PYTHONS,
        }  # fmt: skip
        script = re.sub("|".join(values), lambda word: values[word[0]], _INSTALL)
        told_at = started = time.monotonic()

        def tell(line: str) -> None:
            nonlocal told_at
            if time.monotonic() - told_at > PROGRESS_EVERY_S:
                told_at = time.monotonic()
                progress(f"{name}: {told_at - started:.0f} s: {line.strip()[:100]}")

        done = await self.command("sh -s", input=script.encode(), timeout_s=INSTALL_TIMEOUT_S, on_line=tell)
        if done.rc != 0:
            said = (done.stdout + done.stderr).strip()[-SHOWN_STDERR:]
            raise MachineError(f"{name}: installing ART into {self.folder} failed:\n{said}")
        progress(f"{name}: ART is installed ({time.monotonic() - started:.0f} s)")

    async def start(self) -> ServerState:
        """Start the installed server, and return when it answers. If it runs, only its state is returned.

        The API key is made here when the server is first started, and is kept on the other machine for later starts.

        Raises:
            MachineError: nothing is installed, or the server does not start; the message has the end of its log.
        """
        state = await self._ask("start", {"api_key": f"art-{secrets.token_urlsafe(24)}", "config": self.settings})
        if state is None:
            raise MachineError(f"nothing is installed in {self.folder} on {self.ssh.host}")
        if not state.port or not state.is_running:
            raise MachineError(f"art-server does not start on {self.ssh.host}: {state.failure or 'see keeper.log'}")
        return state

    async def status(self) -> ServerState | None:
        """Return the state of the server; `None` if nothing is installed in its folder."""
        return await self._ask("status")

    async def stop(self) -> None:
        """Stop the server, and wait until all its processes have ended. Jobs go on when it is started again.

        Raises:
            MachineError: it does not end.
        """
        await self._ask("stop")

    async def remove(self, *, delete_data: bool = False) -> bool:
        """Stop the server and delete its environment, key, settings and logs.

        Args:
            delete_data: whether to delete its data directory too, with all models, checkpoints and logs.

        Returns:
            whether there is data that stays.

        Raises:
            MachineError: something cannot be deleted.
        """
        await self.stop()
        folder = shell_path(self.folder)
        script = (
            f"cd {folder} 2> /dev/null || exit 0\nrm -rf {' '.join(_FILES)} {'data' if delete_data else ''} || exit 1\n"
            f"cd / && rmdir {folder} 2> /dev/null\n[ -d {folder}/data ] && echo data stays\nexit 0\n"
        )
        done = await self.command("sh -s", input=script.encode(), timeout_s=600)
        if done.rc != 0:  # a login shell may print something even if all went well
            raise MachineError(f"{self.ssh.host}: deleting {self.folder} failed: {done.stderr.strip()[-SHOWN_STDERR:]}")
        return "data stays" in done.stdout

    async def _ask(self, command: str, request: dict[str, Any] | None = None) -> ServerState | None:
        """Have the keeper do something; returns the state afterwards, `None` if nothing is installed.

        Raises:
            MachineError: the keeper could not do it.
        """
        folder = shell_path(self.folder)
        done = await self.command(
            f"{folder}/venv/bin/python -m art.backends.ssh.keeper {command} {folder}",
            input=json.dumps(request).encode(),
        )
        # A greeting of the login shell may come first, even on the same line.
        answers = re.findall(r"answer (\{.*\})\s*$", done.stdout, re.MULTILINE)
        if not answers:
            if done.rc in (126, 127) or "No module named" in done.stderr:
                return None
            errors = (done.stderr or done.stdout).strip()[-SHOWN_STDERR:]
            raise MachineError(f"{self.ssh.host}: `keeper {command}` failed with status {done.rc}: {errors}")
        answer = json.loads(answers[-1])
        if "error" in answer:
            raise MachineError(f"{self.ssh.host}: {answer['error']}")
        return ServerState(**answer)

    @retry(NUM_TRIES, delay=RETRY_DELAY_S, backoff_factor=1.0, exceptions=(UnreachableError,))
    async def command(
        self, command: str, *, input: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S, on_line: Progress | None = None
    ) -> Completed:
        """Run a command that may be repeated on the server's machine, again if the connection breaks.

        Raises:
            UnreachableError, MachineError: as for `Ssh.run`.
        """
        return await self.ssh.run(command, input=input, timeout_s=timeout_s, on_line=on_line)
