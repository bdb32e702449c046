"""`Nodes`: further machines that train together with the machine of a server.

    here --ssh--> every machine      installs ART on all of them, at once
    here --ssh--> the server's       makes a key there; the nodes let its public half in and tell their host keys
    the server's --ssh--> nodes      starts processes of the trainer, with that key and these host keys only

Before a server starts with nodes, every machine opens a connection to every other one, as the trainer will.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import re
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from art.backends.ssh.remote_server import COMMAND_TIMEOUT_S, Progress, RemoteServer
from art.backends.ssh.ssh import Ssh, end_process, shell_path, start_process
from art.config import NodeConfig, NodesConfig
from art.errors import ArtError, ConfigError, MachineError

T = TypeVar("T")
_SSH_CONFIG = """\
IdentityFile "FOLDER/nodes/key"
IdentitiesOnly yes
UserKnownHostsFile "FOLDER/nodes/known_hosts"
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
UpdateHostKeys no
BatchMode yes
ConnectTimeout 15
ServerAliveInterval 5
ServerAliveCountMax 4
"""
"""How the server's machine connects to each node. No other key and no other file of host keys is used."""


@dataclass(frozen=True, slots=True)
class SshNode:
    """A further machine that trains together with the machine of a server."""

    ssh: Ssh
    """How it is reached from here."""
    address: str | None = None
    """Name or IPv4 address at which the server's machine reaches it, with `:PORT` if its ssh server has another port
    there than on the machine itself. By default the host name and port that ssh uses from here."""

    @classmethod
    def parse(cls, text: str, like: Ssh) -> SshNode:
        """Read `[USER@]MACHINE` or `[USER@]MACHINE=ADDRESS[:PORT]`.

        Args:
            like: machine whose user, port, key file and configuration also apply to this one.

        Raises:
            ConfigError: the text is malformed.
        """
        machine, separator, address = text.partition("=")
        if separator and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(:\d+)?", address):
            raise ConfigError(
                f"a node is a machine like alice@gpu2 or alice@gpu2=10.0.0.2:22, got {text!r}", param="nodes"
            )
        user = None if Ssh(machine).user else like.user
        return cls(Ssh(machine, user, like.port, like.identity, like.config), address or None)


class Nodes:
    """The further machines of one server."""

    def __init__(self, head: RemoteServer, named: Sequence[SshNode] = (), address: str | None = None) -> None:
        """
        Args:
            head: the server, on its machine.
            named: the machines that are asked for. Without any, `describe`, `end` and `remove` ask the server's
                machine for those that it has.
            address: name or IPv4 address of the server's machine in the network of the nodes; by default the one that
                it has on its way to the first node.

        Raises:
            ConfigError: a machine is named twice.
        """
        names = [head.ssh.name, *(node.ssh.name for node in named)]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ConfigError(f"the machine {twice[0]} is named twice; name each machine once", param="nodes")
        self.head = head
        self.named = tuple(named)
        self.address = address

    def check_running(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a running server without its nodes, which are those that were asked for.

        Raises:
            ConfigError: they are others.
        """
        if not self.named:
            return config
        present = config.get("nodes") or {"address": None, "others": []}
        there, asked = [other["name"] for other in present["others"]], [node.ssh.name for node in self.named]
        name = f"the server {self.head.name!r} on {self.head.ssh.name}"
        again = "Stop it (`art launch stop`, or `stop()` of its backend); the next launch joins the machines"
        if there != asked:
            words = f"together with {', '.join(there)}" if there else "without other machines"
            raise ConfigError(f"{name} runs {words}, and asked for is {', '.join(asked)}. {again}", param="nodes")
        if self.address not in (None, present["address"]):
            raise ConfigError(
                f"{name} runs with the address {present['address']}, and asked for is {self.address}. {again}",
                param="address",
            )
        return {key: value for key, value in config.items() if key != "nodes"}

    async def install(self, progress: Progress) -> None:
        """Install ART on all machines at once. Machines that share the server's folder share the installation.

        Raises:
            ConfigError: a node has a server of its own in the folder.
            MachineError: a machine cannot be reached, or ART cannot be installed there.
        """
        servers = [self._server(node) for node in self.named]
        token = secrets.token_hex(8)
        await self.head.ssh.put(token.encode(), f"{self.head.folder}/nodes/token")
        looks = await at_once(map(_look, servers))
        apart = [server for server, look in zip(servers, looks, strict=True) if look.token != token]
        for server, look in zip(servers, looks, strict=True):
            if server in apart and look.has_server:
                raise ConfigError(
                    f"{server.ssh.name} has a server of its own in {server.folder}; take it down, or choose another "
                    "name for this one",
                    param="nodes",
                )
        await at_once(server.install(progress) for server in (self.head, *apart))

    async def join(self, progress: Progress) -> NodesConfig:
        """Let the server's machine start processes on the nodes, and check that all machines can connect.

        Raises:
            MachineError: one cannot reach another; the message says which, and what to do.
        """
        earlier = {node.ssh.name: node for node in await self.recorded()}
        for name in earlier.keys() - {node.ssh.name for node in self.named}:
            if problem := await self._remove(earlier[name], None):
                progress(f"{name} is no longer a node, and could not be cleaned: {problem}")
        servers = [self._server(node) for node in self.named]
        folder = (await _look(self.head)).folder
        public = (await _ask(self.head, "make_key"))["public"]
        answers = await at_once(_ask(server, "admit", public=public) for server in servers)
        places = await at_once(_place(*pair) for pair in zip(self.named, answers, strict=True))
        aliases = [f"node{number}" for number in range(1, len(servers) + 1)]
        blocks, host_keys, rows = [], [], []
        for alias, node, (host, port), answer in zip(aliases, self.named, places, answers, strict=True):
            values = {"HostName": host, "Port": port, "User": answer["user"], "HostKeyAlias": alias}
            blocks += [f"Host {alias}", *(f"  {key} {value}" for key, value in values.items())]
            host_keys += [f"{alias} {key}" for key in answer["host_keys"]]
            row = {"alias": alias, "name": node.ssh.name, "host": host, "port": port}
            rows.append(row | {key: answer[key] for key in ("user", "python", "received")})
        lines = ["# written by ART for its server; another launch writes it again", *blocks, "Host *"]
        files = {
            "ssh_config": "\n".join(lines) + "\n" + _SSH_CONFIG.replace("FOLDER", folder),
            "known_hosts": "\n".join(host_keys) + "\n",
            "machines.json": json.dumps([_record(node) for node in self.named]),
        }
        joined = await _ask(self.head, "join", files=files, nodes=rows, address=self.address, name=self.head.ssh.name)
        others = ", ".join(node.ssh.name for node in self.named)
        progress(f"{self.head.ssh.name}: joined with {others}, for which its address is {joined['address']}")
        start = ("ssh", "-F", f"{folder}/nodes/ssh_config", "-T")
        return NodesConfig(
            address=joined["address"],
            others=tuple(
                NodeConfig(
                    name=row["name"],
                    start=(*start, row["alias"], "{command}"),
                    python=row["python"],
                    received=row["received"],
                )
                for row in rows
            ),
        )

    async def recorded(self) -> tuple[SshNode, ...]:
        """Return the nodes that the server's machine knows."""
        done = await self.head.command(f"cat {shell_path(self.head.folder)}/nodes/machines.json")
        if done.rc != 0:
            return ()
        like = self.head.ssh
        return tuple(
            SshNode(Ssh(row["host"], row["user"], row["port"], like.identity, like.config), row["address"])
            for row in json.loads(done.stdout)
        )

    async def describe(self) -> list[tuple[str, str, str]]:
        """Return name, state in words and version of ART of each node. They are asked at once."""

        async def describe_one(node: SshNode) -> tuple[str, str, str]:
            server = self._server(node)
            try:
                state = await server.status()
                if state is None or not state.version:
                    return node.ssh.name, "nothing installed", "-"
                look = await _ask(server, "look")
            except ArtError as error:
                return node.ssh.name, f"unknown: {error.message.splitlines()[0]}", "-"
            words = "joined" if look["is_admitted"] else "not joined"
            if count := look["num_processes"]:
                words += f", {count} process{'' if count == 1 else 'es'} of the trainer"
            return node.ssh.name, words, state.version

        return await at_once(map(describe_one, self.named or await self.recorded()))

    async def end(self) -> None:
        """Wait until no process of the trainer runs on a node, after the server has ended.

        Raises:
            MachineError: a node cannot be reached.
        """

        async def end_one(server: RemoteServer) -> None:
            with contextlib.suppress(_NoPythonError):
                await _ask(server, "end")

        await at_once(end_one(self._server(node)) for node in self.named or await self.recorded())

    async def remove(self) -> list[str]:
        """Remove everything of the server from its nodes, while it is stopped and still in its folder.

        Returns:
            What could not be removed, in words; empty if nothing is left.
        """
        token = (await _look(self.head)).token
        nodes = self.named or await self.recorded()
        problems = await asyncio.gather(*(self._remove(node, token) for node in nodes))
        return [problem for problem in problems if problem]

    async def _remove(self, node: SshNode, token: str | None) -> str:
        server = self._server(node)
        try:
            look = await _look(server)
            if token is None:
                token = (await _look(self.head)).token
            with contextlib.suppress(_NoPythonError):
                await _ask(server, "leave")
            if not token or look.token != token:  # otherwise it is the folder of the server itself
                await server.remove()
        except ArtError as error:
            return error.message
        return ""

    def _server(self, node: SshNode) -> RemoteServer:
        return RemoteServer(node.ssh, name=self.head.name, install=self.head.install_settings)


async def at_once(actions: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all at once, and return their results when all have ended.

    Raises:
        ArtError: one or more failed; the message has those of all.
    """
    outcomes = await asyncio.gather(*actions, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    errors = [failure for failure in failures if isinstance(failure, ArtError)]
    if failures:
        if len(errors) == len(failures) > 1:
            raise type(errors[0])("\n".join(error.message for error in errors)) from errors[0]
        raise failures[0]
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


@dataclass(frozen=True, slots=True)
class _Look:
    """What a machine has at the place of the server's folder."""

    folder: str
    """Absolute path, without links."""
    token: str
    """What the server's machine left there, which tells whether two machines share the folder."""
    has_server: bool


_LOOK = """\
here=FOLDER
rest=
while ! [ -d "$here" ]; do rest="/${here##*/}$rest"; here=${here%/*}; here=${here:-/}; done
folder=$(cd "$here" && pwd -P)
folder=${folder%/}$rest
echo "folder $folder"
echo "token $(cat "$folder/nodes/token" 2> /dev/null)"
! [ -e "$folder/settings.json" ] || echo server
"""
"""A script for any POSIX shell."""


async def _look(server: RemoteServer) -> _Look:
    script = _LOOK.replace("FOLDER", shell_path(server.folder))
    done = await server.command("sh -s", input=script.encode())
    facts = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    if not facts.get("folder", "").startswith("/"):
        raise MachineError(f"{server.ssh.name} has no usable shell: {(done.stdout + done.stderr).strip()[-500:]}")
    return _Look(facts["folder"], facts.get("token", ""), "server" in facts)


class _NoPythonError(MachineError):
    """There is no environment in the server's folder."""


async def _ask(server: RemoteServer, command: str, **asked: Any) -> dict[str, Any]:
    """Run a command of `node_program` on a machine, and return its answer.

    Raises:
        MachineError: it refuses; the message has the machine's name.
    """
    program = importlib.resources.files("art.backends.ssh").joinpath("node_program.py").read_text(encoding="utf-8")
    call = f"\nrun({command!r}, {COMMAND_TIMEOUT_S - 5}, json.loads({json.dumps(asked)!r}))\n"
    folder = shell_path(server.folder)
    done = await server.command(f"{folder}/venv/bin/python -I - {folder}", input=(program + call).encode())
    answers = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    if not answers:
        kind = _NoPythonError if done.rc in (126, 127) else MachineError
        raise kind(f"{server.ssh.name}: `{command}` failed with status {done.rc}: {done.stderr.strip()[-1000:]}")
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix("answer "))
    if "error" in answer:
        raise MachineError(f"{server.ssh.name}: {answer['error']}")
    return answer


async def _place(node: SshNode, answer: dict[str, Any]) -> tuple[str, int]:
    """Return the address and port at which the server's machine reaches the ssh server of a node."""
    if node.address is not None:
        host, _, port = node.address.partition(":")
        return host, int(port or answer["port"])
    process = await start_process(*node.ssh.base_command("-G"), stdin=asyncio.subprocess.DEVNULL)
    try:
        stdout, _ = await process.communicate()
    finally:
        await end_process(process)
    settings = dict(line.partition(" ")[::2] for line in stdout.decode(errors="replace").splitlines())
    return settings.get("hostname", node.ssh.host), int(settings.get("port", 22))


def _record(node: SshNode) -> dict[str, Any]:
    return {"host": node.ssh.host, "user": node.ssh.user, "port": node.ssh.port, "address": node.address}
