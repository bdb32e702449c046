"""`from art.local.backend import LocalBackend`, as older code writes it."""

from art.backends.local import LocalBackend

__all__ = ["LocalBackend"]
