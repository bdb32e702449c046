"""The settings of a run: what it was started with. They are in `settings.json` of the model's folder, for the page.

{"program": {"command": "art train tic_tac_toe --steps 30", "art": "0.1.0", "python": "3.11.7", "git_commit": "1f0c"},
 "machine": {"host": "lab-3", "system": "Linux 6.8 x86_64", "cores": 16, "memory_gb": 126, "gpus": ["NVIDIA H100"]},
 "task": {"name": "tic_tac_toe", "options": {}, "headline_metric": "win"}, "training": {"learning_rate": 0.003, ...}}
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art.storage.logs import HIDDEN, is_secret, known_secrets, redact

_PACKAGES = {"art": "agent-reinforcement-trainer", "torch": "torch", "transformers": "transformers", "vllm": "vllm"}
"""Names in the settings of the packages whose versions are recorded, if they are installed."""
_NAMED_VALUES = {"--header": ":", "--server-env": "="}
"""Options whose values have a name of their own, with the sign after the name."""


@functools.cache
def describe_program() -> dict[str, Any]:
    """Describe this program: its command line without secrets, versions, and the git commit of the current folder."""
    about: dict[str, Any] = {
        "command": command_line([Path(sys.argv[0]).name, *sys.argv[1:]]), "python": platform.python_version(),
    }  # fmt: skip
    for name, package in _PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            about[name] = importlib.metadata.version(package)
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        described = subprocess.run(describe, capture_output=True, encoding="utf-8", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # not a folder of git
        return about | {"git_commit": None}
    return about | {"git_commit": described.stdout.strip() or None}


@functools.cache
def describe_machine() -> dict[str, Any]:
    """Describe the machine that this program runs on: host, operating system, cores, memory in GB, names of GPUs."""
    gpus: list[str] = []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no GPU of NVIDIA
        gpus = subprocess.run(query, capture_output=True, encoding="utf-8", timeout=10, check=True).stdout.splitlines()
    about = {"host": platform.node(), "system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    memory_gb = None
    if hasattr(os, "sysconf"):  # Windows has none
        memory_gb = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9)
    return {**about, "cores": os.cpu_count(), "memory_gb": memory_gb, "gpus": gpus}


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
            shown.append(_shown_value("", word, secrets))
    return shlex.join(shown)


def _shown_value(option: str, value: str, secrets: Sequence[str]) -> str:
    """Return the value of an option as it may be shown: a name of a variable of the environment stays."""
    if option in _NAMED_VALUES:
        name, separated, hidden = value.partition(_NAMED_VALUES[option])
        return value if not separated or "$" in hidden else f"{name}{separated} ..."
    name, separated, _ = value.partition("=")
    if separated and is_secret(name):  # an option of a task: -o api_key=...
        return f"{name}={HIDDEN}"
    return HIDDEN if is_secret(option.lstrip("-")) and not value.startswith("-") else redact(value, secrets)
