"""The program on the other machine: a `LocalBackend` that outlives ssh connections, and restarts its server as at home.

    python -m art.backends.ssh.keeper COMMAND FOLDER

`start`, `status` and `stop` read a request as JSON from standard input, where no other user sees it, and print the
server's state. `run` is the keeper itself, which `start` leaves running.

    FOLDER/venv/, installed      the environment, and the digest of what was installed
    FOLDER/api.key               the API key, readable for its owner only
    FOLDER/settings.json         settings of the server
    FOLDER/environment.json      variables for the server, such as HF_TOKEN; readable for its owner only, and optional
    FOLDER/state.json            process and port of the keeper that runs, or why it has ended
    FOLDER/keeper.log            what the keeper prints; the server's own log is data/logs/server.log
    FOLDER/data/                 its data directory
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import art
from art.backends.local import LocalBackend
from art.config import ServerConfig
from art.errors import ArtError, ProcessError
from art.storage.atomic import write_file
from art.storage.portable.file_lock import lock_file

START_S, STOP_S = 100.0, 40.0
"""Seconds for the server to answer, and for keeper and server to end."""
LOOK_EVERY_S = 1.0


def main() -> int:
    os.umask(0o077)
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "run":
        asyncio.run(run(folder))
        return 0
    commands: dict[str, Callable[[Path], dict[str, Any]]] = {"start": start, "status": status, "stop": stop}
    try:
        answer = commands[command](folder)
    except (ArtError, OSError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"answer {json.dumps(answer)}\n")
    return 0


def start(folder: Path) -> dict[str, Any]:
    """Start a keeper with its server unless one runs, and wait until the server answers.

    The first key and the data directory stay. Without settings in the request, those of before are used.
    """
    asked = json.load(sys.stdin)
    with locked(folder / "start.lock", START_S) as is_ours:
        if not is_ours:
            raise ProcessError("another start is under way in this folder and does not end")
        if not is_running(folder):
            if not (folder / "api.key").exists():
                write_file(folder / "api.key", asked["api_key"].encode())
            if asked["config"] is not None:
                write_file(folder / "settings.json", json.dumps(asked["config"]).encode())
            (folder / "state.json").unlink(missing_ok=True)
            command = [sys.executable, "-m", "art.backends.ssh.keeper", "run", str(folder)]
            with (folder / "keeper.log").open("ab") as log:
                keeper = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=folder
                )
            deadline = time.monotonic() + START_S
            while keeper.poll() is None and not read(folder / "state.json").get("port"):
                if time.monotonic() > deadline:
                    raise ProcessError(f"the server gives no answer; see {folder}/keeper.log")
                time.sleep(0.05)
    return status(folder)


def status(folder: Path) -> dict[str, Any]:
    """The state of the server; with its key, which only the owner of this folder can ask for."""
    state = {"port": 0, "failure": ""} | read(folder / "state.json")
    return {
        "is_running": is_running(folder), "port": state["port"], "failure": state["failure"],
        "config": read(folder / "settings.json"), "version": art.__version__, "digest": text(folder / "installed"),
        "api_key": text(folder / "api.key"),
    }  # fmt: skip


def stop(folder: Path) -> dict[str, Any]:
    """End the server and its keeper, and wait for their end."""
    deadline = time.monotonic() + STOP_S
    while is_running(folder):
        late_s = time.monotonic() - deadline
        if late_s > 5:
            raise ProcessError(f"the server's keeper does not end; see {folder}/keeper.log")
        if pid := read(folder / "state.json").get("pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late_s > 0 else signal.SIGTERM)
        time.sleep(0.1)
    return status(folder)


async def run(folder: Path) -> None:
    """Keep a server running until a signal comes, or until it has died too often."""
    with locked(folder / "keeper.lock", 5.0) as is_ours:  # those who ask whether it runs hold the lock for a moment
        if not is_ours:
            return
        ends = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ends.set)
        state = {"pid": os.getpid(), "port": 0, "failure": ""}

        def tell(**changes: Any) -> None:
            state.update(changes)
            write_file(folder / "state.json", json.dumps(state).encode())

        tell()
        # Set after the start of this process, so that no list of processes shows it. The server gets it from a pipe.
        os.environ.update(read(folder / "environment.json"))
        os.environ["ART_API_KEY"] = text(folder / "api.key")
        try:
            # Without the list, `LocalBackend` would let every client run code of its own as a loss.
            settings = {"custom_losses": ()} | read(folder / "settings.json")
            config = ServerConfig.model_validate(settings)
            async with LocalBackend(path=folder / "data", server_config=config, show_page=False) as backend:
                while not ends.is_set():
                    client = await backend.open()  # raises when the server has died too often
                    if not state["port"]:
                        tell(port=int(client.base_url.rpartition(":")[2]))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(ends.wait(), LOOK_EVERY_S)
        except (ArtError, ValueError) as error:
            tell(port=0, failure=str(error))


@contextlib.contextmanager
def locked(path: Path, wait_s: float) -> Iterator[bool]:
    """Hold a lock in the body, which gets whether it could be taken within `wait_s` seconds."""
    with path.open("a", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                lock_file(file.fileno())
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                yield False
            else:
                yield True
            return


def is_running(folder: Path) -> bool:
    """Whether a keeper runs. It holds its lock for as long as it lives."""
    with locked(folder / "keeper.lock", 0.2) as is_free:  # another one who asks holds it for a moment
        return not is_free


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text(path) or "{}")
    return content


if __name__ == "__main__":
    sys.exit(main())
