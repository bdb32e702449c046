"""The entry point of `art-server`. It is apart from the command, whose modules cannot be imported on Windows."""

from __future__ import annotations

import sys

from art.backends.platforms import check_server_platform
from art.errors import ConfigError


def main() -> int:
    try:
        check_server_platform("art-server")
    except ConfigError as error:
        print(f"art-server: {error}", file=sys.stderr)
        return 1
    from art.cli.server import main as serve

    return serve()
