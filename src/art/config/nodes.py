"""Settings of the machines (nodes) on which a server starts trainer processes."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from art.config.base import Config

_COMMAND = "{command}"
RECEIVED_VARIABLE = "ART_RECEIVED"
"""Variable that names the folder for files that a machine receives from the server's."""


class NodeConfig(Config):
    """Another machine that trains. It has the same versions of ART and torch. The server's machine sends it the files
    that a step reads, unless it has them at the same path, for example on a network file system."""

    name: str = Field(min_length=1)
    """Name or address of the machine, which errors and logs show."""
    start: tuple[str, ...] = ("ssh", "-o", "BatchMode=yes", "{name}", _COMMAND)
    """Program and arguments that run a shell command on that machine and pass its stdin, stdout and stderr on.
    `{command}` becomes the command, as one argument, and `{name}` the name of the machine."""
    python: str | None = None
    """Python with ART on that machine; `None` is the path of the server's own."""
    received: str | None = None
    """Folder on that machine for the files that it receives; `None` is `~/.cache/art/received`. A base model that is a
    folder on the server stays there. Checkpoints and samples are deleted as soon as they have been read."""

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if _COMMAND not in self.start:
            raise ValueError(f"`start` needs the argument {_COMMAND!r}, which becomes the command; got {self.start}")
        return self

    def command(self, script: str) -> list[str]:
        """Return program and arguments that run a shell script on the machine."""
        places = {_COMMAND: script, "{name}": self.name}
        return [places.get(argument, argument) for argument in self.start]


class NodesConfig(Config):
    """The machines that train together, beside the server's own."""

    address: str = Field(min_length=1)
    """Name or IPv4 address of the server's machine in the network of the nodes. The trainer's first process opens a
    port there that asks for no key: use a network that only the nodes are in."""
    others: tuple[NodeConfig, ...] = Field(min_length=1)
    """The other machines. A trainer with `num_nodes` machines takes the first `num_nodes - 1` of them."""
