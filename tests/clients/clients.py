"""The clients of the suite: a name and the command line of a program that does one task with one library.

A program is run as `command + [task]`. It finds the server in the environment: `CLIENT_URL` (without `/v1`), `CLIENT_KEY`
and `CLIENT_MODEL`. The last line that it prints is JSON, either of

    {"version": "openai 3.54.0", "answer": "it is there"}      `answer` is an object for structured tasks
    {"version": "openai 3.54.0", "unsupported": "why the library cannot do the task"}
    {"version": "openai 3.54.0", "unwritten": true}     the program has no such task
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent

TASKS: Mapping[str, str] = {
    "tools": "tool round trip",
    "streamed": "streamed",
    "structured": "structured",
    "structured_streamed": "structured, streamed",
    "turns": "three turns",
}
"""What each program can be asked for, and the column of the table that says how it went."""


@dataclass(frozen=True)
class Client:
    name: str
    command: list[str]
    needs: Path
    """What `make test-clients` makes for this client. Without it the client is skipped."""

    @property
    def why_not(self) -> str:
        """Why the client is skipped."""
        return f"there is no {self.needs.relative_to(ROOT)}; `make test-clients` makes it"


def python_clients() -> dict[str, Client]:
    """One for each file in requirements/: its own environment runs `programs/run_NAME.py`."""
    clients = {}
    for path in sorted((FOLDER / "requirements").glob("*.txt")):
        python = ROOT / f".venv-clients-{path.stem}" / "bin/python"
        program = FOLDER / "programs" / f"run_{path.stem.replace('-', '_')}.py"
        clients[path.stem] = Client(path.stem, [str(python), str(program)], needs=python)
    return clients


NODE = ROOT / ".venv-clients-node"
NODE_CLIENTS: Mapping[str, list[str]] = {
    "node-openai-chat": ["openai_chat.mjs"],
    "node-openai-responses": ["openai_responses.mjs"],
    "node-ai-sdk": ["ai_sdk.mjs", "openai"],
    "node-ai-sdk-compatible": ["ai_sdk.mjs", "openai-compatible"],
    "node-langchain": ["langchain.mjs"],
    "claude-code": ["claude_code.mjs"],
    "codex": ["codex.mjs"],
}
"""A program of node/ and its arguments. All share the one environment of node/package.json."""


def node_clients() -> dict[str, Client]:
    """The environment has a link to the programs; node looks for packages from where that is, not from where it leads."""
    node = [str(NODE / "bin/node"), "--preserve-symlinks", "--preserve-symlinks-main"]
    return {
        name: Client(name, [*node, str(NODE / "programs" / program), *arguments], needs=NODE / "bin/node")
        for name, (program, *arguments) in NODE_CLIENTS.items()
    }


CLIENTS: Mapping[str, Client] = python_clients() | node_clients()
