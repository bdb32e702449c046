"""Check addresses that users give."""

from __future__ import annotations

from urllib.parse import urlsplit

from art.errors import ConfigError


def check_no_userinfo(address: str, name: str) -> str:
    """Return an address that has no user and no password in it: `http://user:password@host` is refused.

    Addresses are shown in errors, logs and lists of processes, and stored with settings. The message does not show the
    address.

    Args:
        name: the argument or setting that the address was given as.

    Raises:
        ConfigError: there is one.
    """
    try:
        netloc = urlsplit(address).netloc
    except ValueError:  # no address at all, which its user says better
        return address
    if "@" not in netloc:
        return address
    host = netloc.rpartition("@")[2]
    raise ConfigError(
        f"`{name}` has a user or a password before the host {host!r}; give the address without them, and the key where "
        "keys go: in a variable or an argument of its own",
        param=name,
    )
