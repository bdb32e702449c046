"""A fake `sky` on PATH, whose one machine is that of `fake_ssh`. Its answers were recorded: see `sky_recorded/`.

Launching makes a fresh machine, unless it exists; taking it down wipes it. Each call and its environment's secrets can
be looked at.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.support.fake_ssh import FakeMachine

RECORDED = Path(__file__).parent / "sky_recorded"
CLUSTER = "default"
"""Name of the cluster whose server is where the fake machine has its environment."""

_SKY = """\
import json, os, shutil, sys, time
folder, recorded, cluster_template = {folder!r}, {recorded!r}, {status!r}
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("skypilot, version " + open(f"{{folder}}/version").read())
    sys.exit(0)
with open(f"{{folder}}/sky-calls", "a") as file:
    file.write(json.dumps(arguments) + "\\n")
state = json.load(open(f"{{folder}}/sky.json"))
def save():
    with open(f"{{folder}}/sky.json.part", "w") as file:
        json.dump(state, file)
    os.replace(f"{{folder}}/sky.json.part", f"{{folder}}/sky.json")
command = arguments[0]
def fail(queue):
    name = state["failures"][queue].pop(0)
    save()
    if name == "killed":
        os.kill(os.getpid(), 9)
    first, _, text = open(f"{{recorded}}/{{name}}.txt").read().partition("\\n")
    print(text)
    sys.exit(int(first.split()[1]))
if state["failures"].get(command):
    fail(command)
if command == "launch":
    name = arguments[arguments.index("--cluster") + 1]
    shutil.copy(arguments[-1], f"{{folder}}/task.yaml")
    print("Considered resources (1 node):")
    if not os.path.exists(f"{{folder}}/home"):
        shutil.copytree(f"{{folder}}/pristine", f"{{folder}}/home", symlinks=True)
    open(f"{{folder}}/problem", "w").close()
    open(f"{{folder}}/home/.art/servers/{{name}}/in-use", "w").close()
    state["clusters"].setdefault(name, {{"launched_at": int(time.time())}})["status"] = "UP"
    save()
    if state["failures"].get("after launch"):
        fail("after launch")
elif command == "status":
    rows = [json.load(open(cluster_template))[0] | {{"name": name}} | row for name, row in state["clusters"].items()]
    names = [word for word in arguments[1:] if not word.startswith("-") and word != "json"]
    rows = [row for row in rows if not names or row["name"] in names]
    if not rows:
        print(f"Cluster(s) not found: \\x1b[1m{{names[0]}}\\x1b[0m.")
    print(json.dumps(rows, indent=2))
elif command in ("stop", "down"):
    name = arguments[-1]
    if name not in state["clusters"]:
        print(f"Cluster(s) not found: {{name}}.")
    elif command == "stop":
        state["clusters"][name]["status"] = "STOPPED"
    else:
        del state["clusters"][name]
    save()
    with open(f"{{folder}}/problem", "w") as file:
        file.write("ssh: connect to host 127.0.0.1 port 22: Connection refused\\n")
else:
    sys.exit(f"the fake knows no {{command}}")
"""


class FakeSky:
    """SkyPilot with one machine. `machine.bin_dir` on PATH has its program."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        folder = self.folder = machine.folder
        text = _SKY.format(folder=str(folder), recorded=str(RECORDED), status=str(RECORDED / "status.json"))
        (folder / "sky.py").write_text(text)
        program = machine.bin_dir / "sky"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {folder}/sky.py "$@"\n')
        program.chmod(0o755)
        shutil.move(machine.home, folder / "pristine")
        self.set_version("0.14.1")
        self._write({"clusters": {}, "failures": {}})

    def set_version(self, version: str) -> None:
        (self.folder / "version").write_text(version)

    def fail(self, command: str, *recorded: str) -> None:
        """Let the next calls of a command give these recorded answers; `killed` for no answer at all.

        "after launch" as a command fails a launch that has made the machine.
        """
        state = self._read()
        self._write(state | {"failures": state["failures"] | {command: list(recorded)}})

    def calls(self, command: str) -> list[list[str]]:
        """The arguments of each call of a command."""
        path = self.folder / "sky-calls"
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if call[0] == command]

    def clusters(self) -> dict[str, Any]:
        clusters: dict[str, Any] = self._read()["clusters"]
        return clusters

    def task(self) -> str:
        """The task file of the last launch."""
        return (self.folder / "task.yaml").read_text()

    def lose_machine(self) -> None:
        """Take the machine away with everything on it, as a cloud does with a spot machine."""
        self.machine.set_problem("ssh: connect to host 127.0.0.1 port 22: Connection refused\n")
        self.machine.kill()
        shutil.rmtree(self.machine.home)
        self._write(self._read() | {"clusters": {}})

    def _read(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "sky.json").read_text())
        return state

    def _write(self, state: dict[str, Any]) -> None:
        part = self.folder / "sky.json.test"
        part.write_text(json.dumps(state))
        os.replace(part, self.folder / "sky.json")
