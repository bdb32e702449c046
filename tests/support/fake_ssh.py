"""A fake `ssh` on PATH: its other machine is a folder of this one, with a tiny server in place of `art-server`.

It runs the remote command in a shell whose HOME is the folder, forwards ports with `-L`, and notes its arguments.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path

import art

_SSH = """\
import os, sys
folder = os.path.dirname(os.path.abspath(__file__))
with open(f"{folder}/calls", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if os.path.exists(f"{folder}/problem") and (problem := open(f"{folder}/problem").read()):
    sys.stderr.write(problem)
    sys.exit(255)
if "-L" in sys.argv:
    import socket, subprocess, threading
def pump(one, other):
    try:
        while data := one.recv(65536):
            other.sendall(data)
    except OSError:
        pass
    try:
        other.shutdown(socket.SHUT_WR)
    except OSError:
        pass
def serve(listener, port):
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", port))
        except OSError:
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=pump, args=pair, daemon=True).start()
if "-L" in sys.argv:
    _, local, _, remote = sys.argv[sys.argv.index("-L") + 1].split(":")
    try:
        listener = socket.create_server(("127.0.0.1", int(local)))
    except OSError:
        sys.stderr.write(f"bind [127.0.0.1]:{local}: Address already in use\\n")
        if "ExitOnForwardFailure=yes" in sys.argv:
            sys.exit(255)
        listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, int(remote)), daemon=True).start()
if "--" in sys.argv:
    command = sys.argv[sys.argv.index("--") + 2]
else:  # of rsync, which gives the host after the options
    words = sys.argv[1:]
    command = " ".join(words[words.index("rsync"):])
if os.path.exists(f"{folder}/shell_start"):
    command = open(f"{folder}/shell_start").read() + "\\n" + command
shell = f"{folder}/login_shell" if os.path.exists(f"{folder}/login_shell") else "/bin/sh"
home = f"{folder}/home"
environment = {"HOME": home, "PATH": f"{folder}/bin:/usr/bin:/bin", "FAKE": folder}
if "-L" not in sys.argv:
    os.chdir(home)
    os.execve(shell, [shell, "-c", command], environment)
os._exit(subprocess.call([shell, "-c", command], env=environment))
"""
_SERVER = """\
import http.server, json, os, sys, threading
arguments = sys.argv[1:]
line = b""
while not line.endswith(b"\\n"):
    line += os.read(0, 1)
key, config = line.decode().strip(), json.loads(arguments[arguments.index("--config-json") + 1])
if config.get("gpu"):
    sys.exit("art-server: there is no CUDA device")
def until_orphaned():
    while os.read(0, 1000):
        pass
    os._exit(0)
threading.Thread(target=until_orphaned, daemon=True).start()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_known = self.headers["authorization"] == f"Bearer {key}"
        body = json.dumps({"status": "ok", "is_known": is_known, "pid": os.getpid()}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler)
with open("data/logs/address.txt", "w") as file:
    file.write(f"http://127.0.0.1:{server.server_port}")
with open("data/server.lock", "w") as file:
    file.write(str(os.getpid()))
print("art-server listens", flush=True)
server.serve_forever()
"""
_PYTHON = """\
#!/bin/sh
case "$*" in
*"-m pip install"*) cat "$FAKE/pip.txt"; exit "$(cat "$FAKE/pip.rc")" ;;
"-m art.cli.server "*) {serve} ;;
esac
PYTHONPATH={modules} exec {python} "$@"
"""
_SLEEP = """\
case "$1" in 0.25 | 0.3) set 0.1 ;; 1) set 0.3 ;; esac
exec /bin/sleep "$1"
"""
"""The pauses of the scripts, which a tiny server does not need in full."""


class FakeMachine:
    """The other machine of a fake ssh. Put `bin_dir` on PATH."""

    def __init__(self, folder: Path, *, has_art: bool = False) -> None:
        """With `has_art`, its server is a real `art-server`."""
        self.folder, self.home, self.bin_dir = folder, folder / "home", folder / "near"
        self.server_folder = self.home / ".art" / "servers" / "default"
        for path in (self.home, self.bin_dir, folder / "bin", folder / "modules"):
            path.mkdir(parents=True)
        (folder / "ssh.py").write_text(_SSH)
        self._write_program(self.bin_dir / "ssh", f'#!/bin/sh\nexec {sys.executable} -I -S {folder}/ssh.py "$@"\n')
        (folder / "server.py").write_text(_SERVER)
        (folder / "modules/art.py").write_text(f"__version__ = {art.__version__!r}\n")
        if not has_art:
            self.set_program("sleep", _SLEEP)
        self.set_pip("Collecting everything\nInstalling collected packages: art\n")
        self.python = self.server_folder / "venv" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        tiny = f"{sys.executable} -S"
        text = _PYTHON.format(
            modules=shlex.quote(str(Path(art.__file__).parents[1] if has_art else folder / "modules")),
            python=sys.executable if has_art else tiny,
            serve=":" if has_art else f'shift 2; exec {tiny} {shlex.quote(str(folder / "server.py"))} "$@"',
        )
        self._write_program(self.python, text)
        self._write_program(folder / "bin" / "python3", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')

    def set_pip(self, prints: str, rc: int = 0) -> None:
        """Let pip of the machine print this and end with this status."""
        (self.folder / "pip.txt").write_text(prints)
        (self.folder / "pip.rc").write_text(str(rc))

    def set_program(self, name: str, script: str) -> None:
        """Give the machine a program, as a shell script."""
        self._write_program(self.folder / "bin" / name, f"#!/bin/sh\n{script}\n")

    def set_problem(self, text: str = "") -> None:
        """Let every ssh fail with this message from now on; without one, let it work again."""
        (self.folder / "problem").write_text(text)

    def set_foreign_shell(self) -> None:
        """Make the login shell one that has only what csh, fish and sh have in common: words, quotes and `exec`."""
        text = "import os, shlex, sys\nwords = shlex.split(sys.argv[2], posix=True)\n"
        text += "sys.exit('Badly placed ()s.') if words[0] != 'exec' else os.execvp(words[1], words[1:])\n"
        self._write_program(self.folder / "login_shell", f"#!{sys.executable} -IS\n{text}")

    def set_shell(self, start: str) -> None:
        """Let the login shell run this script before each command, as `~/.bashrc` does."""
        (self.folder / "shell_start").write_text(start)

    def calls(self) -> list[str]:
        """The arguments of each call of ssh."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def processes(self, words: str = "") -> dict[int, str]:
        """The command lines of the keeper, the server and the tunnels, by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if str(self.folder) in command and words in command and not is_zombie:
                    found[int(entry.name)] = command
        return found

    def kill(self, words: str = "") -> None:
        """Kill the processes whose command lines have `words`; by default all, as a reboot does."""
        for pid in self.processes(words):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _write_program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)
