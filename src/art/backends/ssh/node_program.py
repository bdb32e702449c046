"""The program that lets the machine of a server start processes on other machines, and checks that they can connect.

It is sent to the Python of each machine over ssh, with one command, and prints one line of JSON. It needs Python 3.11
and nothing else. "Head" is the machine of the server, and "nodes" are the others.

    FOLDER/nodes/key             on the head: its ssh key for the nodes, made there; it never leaves the machine
    FOLDER/nodes/ssh_config      on the head: how it reaches each node, under the names node1, node2 ...
    FOLDER/nodes/known_hosts     on the head: the host keys of the nodes, which they told over a verified connection
    FOLDER/nodes/machines.json   on the head: how the user's machine reaches each node
    FOLDER/nodes/admitted        on a node: the line of ~/.ssh/authorized_keys that lets the key in
    FOLDER/received/             on a node: files that the head has sent to the trainer
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

END_S = 20.0
"""Seconds that processes of the trainer have to end once the server has ended. Then they are killed."""
KILLED_S = 10.0
"""Seconds for killed processes to be gone."""
SHOWN = 400
"""Number of characters of an error output that a message quotes."""


class Refused(Exception):
    """The command cannot do what it is asked for; the message is for the user."""


def run(command: str, timeout_s: float, asked: dict[str, Any]) -> None:
    """Run one command for the folder that is the program's argument, and print its answer."""
    folder = Path(sys.argv[1]).resolve()
    os.umask(0o077)
    signal.alarm(int(timeout_s))  # nobody waits longer for the answer
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "make_key": make_key, "admit": admit, "join": join, "look": look, "end": end, "leave": leave,
    }  # fmt: skip
    try:
        answer = commands[command](folder, **asked)
    except Refused as refused:
        answer = {"error": str(refused)}
    except OSError as error:
        answer = {"error": f"{error.strerror or error} ({error.filename or folder})"}
    sys.stdout.write(f"answer {json.dumps(answer)}\n")


def write(path: Path, content: str) -> None:
    """Replace a file at once; only its owner can read it. A link stays one."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(content, encoding="utf-8")
    part.replace(path)


# ---- on the head


def make_key(folder: Path) -> dict[str, Any]:
    """Return the public half of the key for the nodes, which is made if there is none."""
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise Refused(f"there is no `{program}`, which starts processes on the other machines; install OpenSSH's "
                          "client (Debian: `apt install openssh-client`)")  # fmt: skip
    key = folder / "nodes" / "key"
    key.parent.mkdir(exist_ok=True)
    if not key.exists():
        words = f"ART server {folder} on {socket.gethostname()}"
        made = subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", words, "-f", str(key)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode != 0:
            raise Refused(f"ssh-keygen failed: {made.stderr.strip()[-SHOWN:]}")
    return {"public": key.with_name("key.pub").read_text(encoding="utf-8").strip()}


def join(
    folder: Path, files: dict[str, str], nodes: list[dict[str, Any]], address: str | None, name: str
) -> dict[str, Any]:
    """Write how the nodes are reached, then let every machine connect to every other one, as a trainer will.

    Args:
        files: contents of files in `nodes/`, by name.
        address: of this machine for the nodes; by default the one that it has on its way to the first of them.
        name: of this machine, for messages.

    Returns:
        The address of this machine in the network of the nodes, `address`.
    """
    for file, content in files.items():
        write(folder / "nodes" / file, content)
    address = address or own_address_towards(nodes[0]["host"])
    try:
        socket.create_server((address, 0)).close()
    except OSError as error:
        raise Refused(
            f"it cannot open a port at {address!r} for the other machines: {error.strerror or error}. The address must "
            "be an IPv4 address or name of this machine; give it with `--address`, or `address=`"
        ) from error
    dial = ["-I", "-c", DIAL, address]
    ssh = ["ssh", "-F", str(folder / "nodes" / "ssh_config"), "-T"]
    machines: list[tuple[str, Any, Any]] = [(name, None, start([sys.executable, *dial]))]
    try:
        for node in nodes:
            command = shlex.join([node["python"], *dial])
            machines.append((node["name"], node, start([*ssh, node["alias"], command])))
        places: list[list[Any]] = []
        problems: list[str] = []
        for one, node, process in machines:
            if line := answer_of(process):
                places.append([one, *json.loads(line)])
            elif node is None:
                raise Refused(f"{sys.executable} fails: {process.communicate()[1][-SHOWN:]}")
            else:
                problems.append(no_login(name, node, process))
        if problems:
            raise Refused("\n".join(problems))
        for _, _, process in machines:
            process.stdin.write(json.dumps(places) + "\n")
            process.stdin.flush()
        failures = [
            [one, *failure]
            for one, _, process in machines
            for failure in json.loads(answer_of(process) or '[["it", "", "the connection broke"]]')
        ]
    finally:
        for _, _, process in machines:
            process.kill()
            process.wait()
    if failures:
        lines = [f"{one} cannot open a connection to {other} at {host}: {why}" for one, other, host, why in failures]
        raise Refused("\n".join(lines) + "\nMachines that train together open connections on any port in both "
                      "directions: open the firewall between them, or choose another network with `--address` and "
                      "`--node NODE=ADDRESS`")  # fmt: skip
    return {"address": address}


def start(command: list[str]) -> Any:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def answer_of(process: Any) -> str:
    """The next line of `DIAL`; empty if it has ended. What a login prints is skipped."""
    return next((line for line in iter(process.stdout.readline, "") if line.startswith("[")), "")


DIAL = """\
import json, socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((sys.argv[1], 9))
    own = probe.getsockname()[0]
with socket.create_server((own, 0), backlog=128) as listener:
    print(json.dumps(listener.getsockname()), flush=True)
    failures = []
    for name, host, port in json.loads(sys.stdin.readline()):
        try:
            socket.create_connection((host, port), timeout=10).close()
        except OSError as error:
            failures.append([name, host, error.strerror or str(error)])
    print(json.dumps(failures), flush=True)
    sys.stdin.read()
"""
"""What runs on each machine meanwhile. It listens until the head has all answers."""


def own_address_towards(host: str) -> str:
    """The IPv4 address that this machine has in the network through which it reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: it only asks for the route
        except OSError as error:
            raise Refused(
                f"it knows no way to {host} over IPv4 ({error.strerror or error}); name the node as NODE=ADDRESS, with "
                "its address in a network that both machines are in"
            ) from error
        address: str = probe.getsockname()[0]
        return address


def no_login(head: str, node: dict[str, Any], process: subprocess.Popen[str]) -> str:
    """Say why the head could not start a process on a node, and what to do."""
    said = process.communicate()[1].strip()[-SHOWN:]
    advice = (
        f"if {head} reaches it at another address than your machine does, name the node as {node['name']}=ADDRESS or "
        "=ADDRESS:PORT"
    )
    if "Host key verification failed" in said:
        advice = f"another machine than {node['name']} answers at this address; {advice}"
    elif "Permission denied" in said:
        advice = (
            "its ssh server must accept keys and read ~/.ssh/authorized_keys (AuthorizedKeysFile, PubkeyAuthentication "
            "and AllowUsers in its sshd_config)"
        )
    place = f"{node['user']}@{node['host']} port {node['port']}"
    return f"{head} cannot log in to {node['name']} ({place}): {said or 'no reason was given'}; {advice}"


# ---- on a node


def admit(folder: Path, public: str) -> dict[str, Any]:
    """Let the head's key log in to this account, and return how the head reaches it.

    Returns:
        `user`, `address` and `port` of the ssh server that this connection came to, its `host_keys`, and for the
        trainer its `python` and the folder for files that it has `received`.
    """
    if not folder.is_dir():
        raise Refused(f"there is no folder {folder}")
    let_out(folder)
    line = f"restrict {public}"  # no forwarding, no terminal
    file = authorized_keys()
    present = file.read_bytes() if file.exists() else b""
    if line.encode() not in present.splitlines():
        if present and not present.endswith(b"\n"):
            present += b"\n"
        write_keys(file, present + line.encode() + b"\n")
    write(folder / "nodes" / "admitted", line)
    words = os.environ.get("SSH_CONNECTION", "").split()
    address, port = words[2:4] if len(words) == 4 else ("127.0.0.1", "22")
    keys = host_keys(address, port)
    if not keys:
        raise Refused(f"its ssh server at {address} port {port} shows no host key to `ssh-keyscan`, and none is in "
                      "/etc/ssh; install OpenSSH's client (Debian: `apt install openssh-client`)")  # fmt: skip
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    place = {"user": user, "address": address, "port": int(port), "host_keys": keys}
    return place | {"python": interpreter(folder), "received": str(folder / "received")}


def interpreter(folder: Path) -> str:
    """The Python for the trainer. It sets the variables of environment.json, if there is one, such as HF_TOKEN; no list
    of processes shows them."""
    python, variables, script = folder / "venv" / "bin" / "python", folder / "environment.json", folder / "nodes/python"
    if not variables.exists():
        return str(python)
    write(script, f'#!/bin/sh\nexec {shlex.join([str(python), "-c", SET_VARIABLES, str(variables)])} "$@"\n')
    script.chmod(0o700)
    return str(script)


SET_VARIABLES = """\
import json, os, sys
with open(sys.argv[1], encoding="utf-8") as file:
    os.environ.update(json.load(file))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def host_keys(address: str, port: str) -> list[str]:
    """The host keys of the ssh server at an address of this machine: nobody on the network is asked."""
    lines: list[str] = []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        scan = subprocess.run(
            ["ssh-keyscan", "-T", "10", "-p", port, address], capture_output=True, text=True, check=False, timeout=60
        )
        lines = [line.partition(" ")[2] for line in scan.stdout.splitlines() if not line.startswith("#")]
    if not lines:
        for path in sorted(Path("/etc/ssh").glob("ssh_host_*_key.pub")):
            lines.append(" ".join(path.read_text(encoding="utf-8").split()[:2]))
    return lines


def look(folder: Path) -> dict[str, Any]:
    """Whether the head's key is let in here, and how many processes of the trainer run."""
    admitted, file = folder / "nodes" / "admitted", authorized_keys()
    lines = file.read_bytes().splitlines() if file.exists() else []
    is_admitted = admitted.exists() and admitted.read_bytes() in lines
    return {"is_admitted": is_admitted, "num_processes": len(trainer_processes(folder))}


def end(folder: Path) -> dict[str, Any]:
    """Wait until no process of the trainer runs here, and kill what is left after a while."""
    deadline = time.monotonic() + END_S
    while (pids := trainer_processes(folder)) and time.monotonic() < deadline + KILLED_S:
        for pid in pids if time.monotonic() > deadline else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return {}


def leave(folder: Path) -> dict[str, Any]:
    """Undo `admit`, and end processes of the trainer."""
    end(folder)
    let_out(folder)
    return {}


def let_out(folder: Path) -> None:
    """Remove the line that `admit` has added, and no other."""
    admitted = folder / "nodes" / "admitted"
    try:
        line, file = admitted.read_bytes(), authorized_keys()
    except FileNotFoundError:
        return
    if file.exists():
        present = file.read_bytes().splitlines(keepends=True)
        kept = [each for each in present if each.rstrip(b"\r\n") != line]
        if kept != present:
            write_keys(file, b"".join(kept))
    admitted.unlink(missing_ok=True)  # two who take the node down at once are no problem


def authorized_keys() -> Path:
    return Path.home() / ".ssh" / "authorized_keys"


def write_keys(file: Path, content: bytes) -> None:
    file = file.resolve()
    file.parent.mkdir(mode=0o700, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_bytes(content)
    if file.exists():
        shutil.copymode(file, part)
    part.replace(file)


def trainer_processes(folder: Path) -> list[int]:
    """Process ids of the trainer in this folder's environment. Empty where there is no /proc."""
    pids, python = [], os.fsencode(folder / "venv" / "bin" / "python")
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0] == python and b"art.runtime.children.trainer_team" in words:
                pids.append(int(entry.name))
    return pids
