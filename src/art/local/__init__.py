"""The module from which older code imports `LocalBackend`; today it is `art.LocalBackend`."""

from art.backends.local import LocalBackend

__all__ = ["LocalBackend"]
