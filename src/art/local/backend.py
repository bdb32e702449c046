"""`LocalBackend`, under the module name of older code."""

from art.backends.local import LocalBackend

__all__ = ["LocalBackend"]
