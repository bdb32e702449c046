"""The program on the other machine: it installs ART into its folder, and keeps one `art-server` running.

It is copied there as one file and needs Python 3.11 and nothing else, since it runs before ART is installed. Commands
read their input as JSON from standard input, where no other user sees it, and print one line of JSON.

    FOLDER/keeper.py             this file
    FOLDER/venv/                 the virtual environment; installed.json says what is in it, install.log how it got in
    FOLDER/api.key               the API key, readable for its owner only
    FOLDER/settings.json         settings and port of the server
    FOLDER/environment.json      variables for the server, such as HF_TOKEN; readable for its owner only, and optional
    FOLDER/state.json            the port and the process ids of the server that runs, or why it does not
    FOLDER/server.log            what the server prints; server.log.old has what it printed before
    FOLDER/data/                 its data directory
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).resolve().parent
PYTHON = FOLDER / "venv" / "bin" / "python"
KEY, SETTINGS, STATE = FOLDER / "api.key", FOLDER / "settings.json", FOLDER / "state.json"
ENVIRONMENT = FOLDER / "environment.json"
SERVER_LOG, INSTALL_LOG, INSTALLED = FOLDER / "server.log", FOLDER / "install.log", FOLDER / "installed.json"
MAX_LOG_BYTES = 32 << 20
ROTATE_EVERY_S = 10.0
OLD_SERVER_S = 15.0
"""Seconds for a server whose keeper was killed to end and to leave its port."""
QUICK_S, MAX_QUICK_EXITS = 20.0, 5
"""A server that ends by itself this many times, each time sooner than this many seconds, is not started again."""
LONGEST_DELAY_S = 10.0
START_S, STOP_S = 60.0, 40.0
"""Seconds for the keeper to take its port, and for keeper and server to end."""
END_S = 20.0
"""Seconds for the server to end when it is asked to. Then it is killed."""


class Refused(Exception):
    """The command cannot do what it is asked for; the message is for the user."""


def main() -> int:
    commands: dict[str, Callable[[], dict[str, Any] | None]] = {
        "install": install, "start": start, "status": status, "stop": stop, "supervise": supervise, "serve": serve,
    }  # fmt: skip
    os.umask(0o077)
    for stream in (sys.stdout, sys.stderr):  # the account may have a locale that lacks characters of pip
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        answer = commands[sys.argv[1]]()
    except Refused as refused:
        answer = {"error": str(refused)}
    except OSError as error:
        answer = {"error": f"{error.strerror or error} ({error.filename or FOLDER})"}
    if answer is not None:
        say("answer " + json.dumps(answer))
    return 0


def say(line: str) -> None:
    """Print a line. A connection that broke meanwhile is no reason to stop."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def request() -> dict[str, Any]:
    content: dict[str, Any] = json.load(sys.stdin)
    return content


def read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


def write(path: Path, content: str) -> None:
    """Replace a file at once and durably; only its owner can read it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextlib.contextmanager
def locked(name: str, wait_s: float, *, kind: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Hold the lock `name` in the body, which gets whether it could be taken within `wait_s` seconds."""
    with (FOLDER / f"{name}.lock").open("a", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.05)
                continue
            yield True
            return


def is_running() -> bool:
    """Whether a keeper runs. It holds its lock for as long as it lives."""
    with locked("keeper", 0.0, kind=fcntl.LOCK_SH) as is_free:  # those who ask at once do not take each other for it
        return not is_free


def tail(path: Path, num_lines: int = 15) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
    return ""


# ---- installing


def install() -> dict[str, Any]:
    """Make the environment hold what the request names. If it does already, nothing is done."""
    asked = request()
    with locked("install", asked["timeout_s"]) as is_ours:
        if not is_ours:
            raise Refused("another installation runs in this folder and does not end; see install.log")
        if read(INSTALLED).get("digest") == asked["digest"] and PYTHON.exists():
            return read(INSTALLED)
        INSTALLED.unlink(missing_ok=True)
        with INSTALL_LOG.open("w", encoding="utf-8") as log:
            make_environment(log)
            if (archive := FOLDER / "source.tar").exists() and asked["target"].startswith("./source"):
                shutil.rmtree(FOLDER / "source", ignore_errors=True)
                with tarfile.open(archive) as files:
                    files.extractall(FOLDER / "source")  # our own client made it
            pip(asked, log)
        asking = [str(PYTHON), "-c", "import art; print(art.__version__)"]
        version = subprocess.run(asking, capture_output=True, text=True, errors="replace", cwd=FOLDER, check=False)
        if version.returncode != 0:
            raise Refused(f"ART was installed but cannot be imported:\n{version.stderr[-2000:]}")
        installed = {"digest": asked["digest"], "version": version.stdout.strip()}
        write(INSTALLED, json.dumps(installed))
        return installed


def make_environment(log: IO[str]) -> None:
    asking = [str(PYTHON), "-m", "pip", "--version"]
    with contextlib.suppress(OSError):  # there is no interpreter, or it is gone since the system was renewed
        if subprocess.run(asking, stdout=log, stderr=log, check=False).returncode == 0:
            return
    say("making a virtual environment")
    shutil.rmtree(FOLDER / "venv", ignore_errors=True)
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(FOLDER / "venv")], capture_output=True, text=True, errors="replace",
        check=False,
    )  # fmt: skip
    log.write(made.stdout + made.stderr)
    log.flush()
    if made.returncode != 0:
        shutil.rmtree(FOLDER / "venv", ignore_errors=True)
        what = made.stdout + made.stderr
        if "ensurepip" in what:
            raise Refused(
                f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu install python3-venv; or "
                "name another Python, such as one of `uv python install 3.12` or conda"
            )
        raise Refused(f"making a virtual environment with {sys.executable} failed:\n{what[-2000:]}")


def pip(asked: dict[str, Any], log: IO[str]) -> None:
    """Run pip, and pass on its lines. The index may have a password in it, so it is not an argument."""
    settings = FOLDER / "pip.conf"
    environment = dict(os.environ)
    if asked.get("index_url"):
        write(settings, f"[global]\nindex-url = {asked['index_url']}\n")
        environment["PIP_CONFIG_FILE"] = str(settings)
        environment.pop("PIP_INDEX_URL", None)  # it would win over the file
    try:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
             asked["target"]],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            cwd=FOLDER, env=environment,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            say(line.rstrip())
        process.wait()
    finally:
        settings.unlink(missing_ok=True)
    if process.returncode != 0:
        lines = tail(INSTALL_LOG)
        if "No space left on device" in lines or "Disk quota exceeded" in lines:
            raise Refused(f"the disk of {FOLDER} is full; pip needs space there and in its cache:\n{lines}")
        raise Refused(f"pip failed (all of it is in {INSTALL_LOG}):\n{lines}")


# ---- starting, looking, stopping


def start() -> dict[str, Any]:
    """Start a keeper with its server, unless one runs. The first key and the data directory stay.

    Settings that are not named are those of before.
    """
    asked = request()
    with locked("start", START_S) as is_ours:
        if not is_ours:
            raise Refused("another start is under way in this folder and does not end")
        if not is_running():
            if not KEY.exists():
                write(KEY, asked["api_key"])
            before = {"config": {}, "port": 0} | read(SETTINGS)
            named = {name: asked[name] for name in before if asked[name] is not None}
            write(SETTINGS, json.dumps(before | named))
            STATE.rename(FOLDER / "before.json") if STATE.exists() else None
            with SERVER_LOG.open("a", encoding="utf-8") as log:
                process = subprocess.Popen(
                    [str(PYTHON), str(FOLDER / "keeper.py"), "supervise"], stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log, start_new_session=True, cwd=FOLDER,
                )  # fmt: skip
            deadline = time.monotonic() + START_S
            has_ended = False
            while not read(STATE):
                if has_ended or time.monotonic() > deadline:
                    raise Refused(f"the server's keeper did not start:\n{tail(SERVER_LOG)}")
                has_ended = process.poll() is not None  # it may have written its state just before its end
                time.sleep(0.02)
    return status()


def status() -> dict[str, Any]:
    """The state of the server; with its key, which only the owner of this folder can ask for."""
    state = {"is_running": is_running(), "installed": read(INSTALLED), "config": read(SETTINGS).get("config", {})}
    state |= {"port": 0, "server_pid": 0, "num_starts": 0, "failure": "", "last_exit": ""} | read(STATE)
    state["api_key"] = KEY.read_text(encoding="utf-8") if KEY.exists() else ""
    return state


def stop() -> dict[str, Any]:
    """End the server and its keeper, and wait for their end."""
    deadline = time.monotonic() + STOP_S
    while is_running():
        keeper = read(STATE).get("keeper_pid", 0)
        late = time.monotonic() > deadline
        with contextlib.suppress(ProcessLookupError):
            if keeper:
                os.kill(keeper, signal.SIGKILL if late else signal.SIGTERM)
        if time.monotonic() > deadline + 5:
            raise Refused(f"the server's keeper (process {keeper}) does not end")
        time.sleep(0.1)
    return status()


# ---- the keeper itself


def supervise() -> None:
    """Own the listening socket, and keep a server on it until a signal comes. New connections wait in the socket's
    queue while the server restarts."""
    with locked("keeper", 5.0) as is_ours:  # `is_running` holds the lock for a moment
        if not is_ours:
            return
        asked = is_asked_to_end()
        state: dict[str, Any] = {"keeper_pid": os.getpid(), "num_starts": 0, "last_exit": "", "log_start": log_size()}
        try:
            sock = listen(read(SETTINGS)["port"], read(FOLDER / "before.json").get("port", 0))
        except Refused as refused:
            write(STATE, json.dumps(state | {"failure": str(refused)}))
            return
        state["port"] = sock.getsockname()[1]
        num_quick, rotated = 0, 0.0
        while not asked():
            started, log_start = time.monotonic(), log_size()
            with SERVER_LOG.open("a", encoding="utf-8") as log:
                server = subprocess.Popen(
                    [str(PYTHON), str(FOLDER / "keeper.py"), "serve", str(sock.fileno())], stdin=subprocess.PIPE,
                    stdout=log, stderr=log, pass_fds=[sock.fileno()], start_new_session=True, cwd=FOLDER,
                )  # fmt: skip
            state |= {"server_pid": server.pid, "num_starts": state["num_starts"] + 1, "log_start": log_start}
            write(STATE, json.dumps(state))
            while server.poll() is None and not asked():
                if time.monotonic() - rotated > ROTATE_EVERY_S:
                    rotate_log()
                    rotated = time.monotonic()
                time.sleep(0.1)
            if asked():
                end(server)
                break
            num_quick = num_quick + 1 if time.monotonic() - started < QUICK_S else 0
            state["last_exit"] = describe(server.returncode)
            if server.returncode >= 0 and num_quick >= MAX_QUICK_EXITS:
                state["failure"] = f"it ended {num_quick} times in a row at once ({state['last_exit']})"
                break
            pause_until(time.monotonic() + min(0.1 * 2**num_quick, LONGEST_DELAY_S), asked)
        sock.close()
        write(STATE, json.dumps(state | {"server_pid": 0}))


def rotate_log() -> None:
    """Move a log that is too large away while the server goes on writing to its end.

    The server and this program keep their file, so its content is copied, and it is emptied. A line that is written in
    between may be lost.
    """
    with contextlib.suppress(OSError):  # a full disk must not end the keeper
        if log_size() > MAX_LOG_BYTES:
            shutil.copyfile(SERVER_LOG, FOLDER / "server.log.old")
            os.truncate(SERVER_LOG, 0)


def log_size() -> int:
    return SERVER_LOG.stat().st_size if SERVER_LOG.exists() else 0


def is_asked_to_end() -> Callable[[], bool]:
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return lambda: bool(signals)


def pause_until(deadline: float, asked: Callable[[], bool]) -> None:
    while time.monotonic() < deadline and not asked():
        time.sleep(0.05)


def listen(asked_port: int, earlier_port: int) -> socket.socket:
    """Listen on the port that is asked for, or on that of before, or on a free one."""
    deadline = time.monotonic() + OLD_SERVER_S
    port = asked_port or earlier_port
    while True:
        try:
            return socket.create_server(("127.0.0.1", port), backlog=4096)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)  # a server whose keeper was killed is on its way out
            elif asked_port:
                raise Refused(f"port {asked_port} is in use ({error.strerror}); choose another one") from error
            else:
                port = 0


def end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def describe(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {-status}"


def serve() -> None:
    """Become the server. The key is set after the start of the process, so no list of processes shows it."""
    sys.path[:] = [path for path in sys.path if path != str(FOLDER)]
    os.environ |= read(ENVIRONMENT)
    os.environ["ART_API_KEY"] = KEY.read_text(encoding="utf-8")
    config = json.dumps(read(SETTINGS)["config"])
    art_server = importlib.import_module("art.cli.server")  # of the environment there, and not of the client's
    arguments = ["--data-dir", str(FOLDER / "data"), "--config-json", config, "--fd", sys.argv[2], "--die-with-parent"]
    sys.exit(art_server.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
