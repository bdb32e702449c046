"""Docker and podman: what the walk asks of either, whose commands differ in a few words."""

from __future__ import annotations

import json
import resource
import subprocess
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Containers:
    """A program that runs containers.

    Attributes:
        program: its name, and options that stand before every command.
    """

    program: tuple[str, ...]

    @property
    def is_docker(self) -> bool:
        return self.program == ("docker",)

    def call(self, *args: str, text: str = "") -> str:
        """Run a command with `text` as its standard input, and return its output.

        Raises:
            RuntimeError: it failed. The message has what it wrote to standard error.
        """
        done = self.attempt(*args, text=text)
        if done.returncode:
            raise RuntimeError(
                f"{self.program[0]} {' '.join(args)}: exit status {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout.strip()

    def attempt(self, *args: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command that may fail."""
        return subprocess.run([*self.program, *args], input=text, capture_output=True, text=True)

    def config(self, image: str) -> dict[str, Any]:
        """Read what an image says about itself: its labels, variables, user."""
        (found,) = json.loads(self.call("image", "inspect", image))
        config: dict[str, Any] = found["Config"]
        return config

    def passes_health_check(self, name: str) -> bool:
        """Whether the image's health check says that the container is well.

        Docker runs the check by itself, podman where systemd does: there it is run now.
        """
        if self.is_docker:
            return self.call("inspect", "--format", "{{.State.Health.Status}}", name) == "healthy"
        return self.attempt("healthcheck", "run", name).returncode == 0

    def read_only(self) -> list[str]:
        """Flags for a read-only root, without folders in memory that were not asked for."""
        return ["--read-only"] if self.is_docker else ["--read-only", "--read-only-tmpfs=false"]

    def limits(self) -> list[str]:
        """Flags for limits that this user may set: podman's own are refused where root may not raise its limits."""
        flags = []
        for name, limit, enough in (("nofile", resource.RLIMIT_NOFILE, 65536), ("nproc", resource.RLIMIT_NPROC, 16384)):
            _, most = resource.getrlimit(limit)
            number = enough if most == resource.RLIM_INFINITY else min(most, enough)
            flags.append(f"--ulimit={name}={number}:{number}")
        return [] if self.is_docker else flags

    def remove(self, name: str, *volumes: str) -> None:
        """Remove a container and volumes, if they are there."""
        self.attempt("kill", "--signal", "KILL", name)
        self.attempt("rm", "--force", name)
        self.attempt("volume", "rm", "--force", *volumes)


DOCKER = Containers(("docker",))
PODMAN = Containers(("podman", "--runtime", "runc"))
"""Podman with the runtime that Docker uses, which also runs where control groups of both versions are mounted."""
