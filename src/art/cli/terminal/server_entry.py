"""The entry point of `art-server`. It is apart from the command, whose modules cannot be imported on Windows."""

from __future__ import annotations

import sys

from art.backends.platforms import check_server_platform
from art.cli.terminal.extras import how_to_install
from art.errors import ConfigError


def main() -> int:
    try:
        check_server_platform("art-server")
    except ConfigError as error:
        print(f"art-server: {error}", file=sys.stderr)
        return 1
    try:
        from art.cli.server import main as serve
    except ModuleNotFoundError as error:
        if (words := how_to_install(error)) is None:
            raise
        print(f"art-server: {words}", file=sys.stderr)
        return 1
    return serve()
