"""What a key may be used for, and what it must look like to travel in a header."""

from __future__ import annotations

from typing import Literal

from art.errors import ConfigError

KeyScope = Literal["infer", "train", "admin"]
"""`infer`: sample from models and read what was recorded. `train`: register models, train them, manage their
checkpoints. `admin`: all of it, and what touches the machine: devices, paths, addresses and flags of engines."""


def check_api_key(key: str) -> str:
    """The key itself, if it can stand in an HTTP header.

    Raises:
        ConfigError: it has a character that no header may have. The message does not show the key.
    """
    place = next((i for i, character in enumerate(key) if not "!" <= character <= "~"), None)
    if place is None:
        return key
    what = {"\n": "a line break", "\r": "a line break", " ": "a space"}.get(key[place])
    what = what or ("a control character" if key[place].isascii() else "a character outside of ASCII")
    raise ConfigError(
        f"the API key has {what} at place {place + 1} of {len(key)}; expected printable ASCII without spaces. Pass the "
        "key alone, without what was printed or written beside it",
        param="api_key",
    )
