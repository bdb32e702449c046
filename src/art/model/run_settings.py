"""The settings of a run: what it was started with. They are in `settings.json` of the model's folder, for the page.

{"program": {"command": "art train tic_tac_toe --steps 30", "art": "0.1.0", "python": "3.11.7", "git_commit": "1f0c"},
 "task": {"name": "tic_tac_toe", "options": {}, "headline_metric": "win"}, "training": {"learning_rate": 0.003, ...}}
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art.sinks.choose import is_secret
from art.storage.log_lines import HIDDEN, known_secrets, redact

_PACKAGES = {"art": "agent-reinforcement-trainer", "torch": "torch", "transformers": "transformers", "vllm": "vllm"}
"""Names in the settings of the packages whose versions are recorded, if they are installed."""
_NAMED_VALUES = {"--header": ":", "--server-env": "="}
"""Options whose values have a name of their own, with the sign after the name."""


@functools.cache
def describe_program() -> dict[str, Any]:
    """Describe this program: its command line without secrets, versions, and the git commit of the current folder."""
    versions = {name: _version_of(package) for name, package in _PACKAGES.items()}
    return {
        "command": command_line([Path(sys.argv[0]).name, *sys.argv[1:]]), "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version}, "git_commit": _git_commit(),
    }  # fmt: skip


def command_line(words: Sequence[str]) -> str:
    """Write a command as it was typed, without the values of headers, variables and keys."""
    shown: list[str] = []
    secrets = known_secrets()
    for word in words:
        option, equals, value = word.partition("=")
        if shown and shown[-1].startswith("-"):
            shown.append(_shown_value(shown[-1], word, secrets))
        elif equals and option.startswith("-"):
            shown.append(f"{option}={_shown_value(option, value, secrets)}")
        else:
            shown.append(redact(word, secrets))
    return shlex.join(shown)


def _shown_value(option: str, value: str, secrets: Sequence[str]) -> str:
    """Return the value of an option as it may be shown: a name of a variable of the environment stays."""
    if option in _NAMED_VALUES:
        name, separated, hidden = value.partition(_NAMED_VALUES[option])
        return value if not separated or "$" in hidden else f"{name}{separated} ..."
    return HIDDEN if is_secret(option.lstrip("-")) and not value.startswith("-") else redact(value, secrets)


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Return the commit of the current folder, with `-dirty` after it if files were changed; `None` outside of git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
