"""What to install when a command needs a package that is not there."""

from __future__ import annotations

import re
from importlib import metadata

_DISTRIBUTION = "agent-reinforcement-trainer"


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """Say which package is missing and how to get it; `None` if no extra of ART brings that module."""
    module = (error.name or "").partition(".")[0]
    for requirement in metadata.requires(_DISTRIBUTION) or ():
        match = re.match(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]", requirement)
        if match is not None and match[1].lower().replace("-", "_") == module:
            return f"{module} is not installed: pip install '{_DISTRIBUTION}[{match[2]}]'"
    return None
