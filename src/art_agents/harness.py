"""What ART knows of a command-line agent: its package, and how it is started on one instruction without a person.

    harness = find_harness("claude-code")          # or "command:my-agent --yes"
    dockerfile = harness.dockerfile(image)         # a layer on the task's image
    launch = harness.launch(Start(address=..., side_address=..., model="tasks/agent@3", max_context=32768))

Each agent has a module of its own with a `HARNESS`. An agent runs in a container without network, where `address` leads
to the rollout alone (`art_agents.address`). It needs a key to start at all, and `NO_KEY` is it; the address adds the
real one outside of the container.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from art.errors import ConfigError

INSTRUCTION = "/opt/art-agent/instruction.md"
"""File in the container with what the agent is asked to do."""
HOME = "/opt/art-agent/home"
"""The agent's home in the container, so that its files are not those of the task."""
PREFIX = "/opt/art-agent"
NO_KEY = "art"
AGENTS = ("aider", "claude-code", "codex", "mini-swe-agent", "opencode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What an agent is started with."""

    address: str
    """URL without a path that answers as the rollout, in the container. All dialects are below `/v1`."""
    side_address: str
    """The same for side requests, which an agent makes besides the task: for a title, for example."""
    model: str
    """Name of the model, such as `project/name@step`."""
    max_context: int
    """Most tokens of prompt and answer together, so that the agent compacts its conversation in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How an agent is started in a container."""

    script: str
    """For bash, in the task's folder. The agent's exit code is that of the script."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by path in the container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """A command-line agent that ART can install and run."""

    name: str
    installer: Literal["npm", "pip"] | None
    """The program that installs it; `None` where the task's image has it."""
    package: str
    version: str
    launch: Callable[[Start], Launch]
    side_requests: str = ""
    """What it asks besides the task at `side_address`, and has no switch against."""

    def dockerfile(self, image: str) -> str:
        """The Dockerfile that adds the agent to a task's image, which must have bash and be of Debian's family unless
        it has Node.js or Python already."""
        if self.installer is None:
            return f"FROM {image}\n"
        if self.installer == "npm":
            needs, packages = "npm", "nodejs npm ca-certificates"
            install = f"npm install --global --no-audit --no-fund --prefix {PREFIX} {self.package}@{self.version}"
        else:
            needs, packages = "python3 -m venv --help", "python3 python3-venv ca-certificates"
            install = f"python3 -m venv {PREFIX} && {PREFIX}/bin/pip install --quiet {self.package}=={self.version}"
        return (
            f"FROM {image}\nRUN {needs} >/dev/null 2>&1 "
            f"|| (apt-get update && apt-get install -y --no-install-recommends {packages})\nRUN {install}\n"
        )


def find_harness(agent: str) -> Harness:
    """Find an agent by name, or make one of `command:COMMAND`.

    Raises:
        ConfigError: it is not known, or the command is empty.
    """
    name, _, command = agent.partition(":")
    if name == "command":
        if not command.strip():
            raise ConfigError('`agent`: say what to run after `command:`, e.g. "command:my-agent --yes"')
        return _of_command(command)
    if agent not in AGENTS:
        known = ", ".join(AGENTS)
        raise ConfigError(f"`agent`: there is no {agent!r}; there are {known}, and `command:COMMAND` for any other")
    harness: Harness = importlib.import_module(f"art_agents.{agent.replace('-', '_')}").HARNESS
    return harness


def _of_command(command: str) -> Harness:
    """A command of the task's image. It finds address and model in the variables of the common libraries."""

    def launch(start: Start) -> Launch:
        return Launch(
            script=command,
            env={
                "OPENAI_BASE_URL": f"{start.address}/v1", "OPENAI_API_KEY": NO_KEY,
                "ANTHROPIC_BASE_URL": start.address, "ANTHROPIC_API_KEY": NO_KEY,
                "ART_MODEL": start.model, "ART_MAX_CONTEXT": str(start.max_context), "ART_INSTRUCTION": INSTRUCTION,
            },
        )  # fmt: skip

    return Harness(name="command", installer=None, package="", version="", launch=launch)


def script(*words: str) -> str:
    """A line of bash that runs words as they are. `INSTRUCTION` as a word of its own is the text of that file."""
    return " ".join(f'"$(cat {INSTRUCTION})"' if word == INSTRUCTION else shlex.quote(word) for word in words)
