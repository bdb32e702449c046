"""Where older code looks for `LocalBackend`."""

from art.backends.local import LocalBackend

__all__ = ["LocalBackend"]
