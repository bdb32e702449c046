"""Scopes of API keys, and which characters a key may have."""

from __future__ import annotations

from typing import Literal

from art.errors import ConfigError

KeyScope = Literal["infer", "train", "admin"]
"""`infer`: sample from models and read records. `train`: register models, train them, manage their checkpoints.
`admin`: everything, with settings that touch the machine: devices, paths, addresses and flags of engines."""


def check_api_key(key: str) -> str:
    """Return the key if an HTTP header can carry it.

    Raises:
        ConfigError: the key has a character that no header may have. The message does not show the key.
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
