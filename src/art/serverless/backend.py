"""The module from which older code imports `ServerlessBackend`; today it is `art.ServerlessBackend`."""

from art.backends.serverless.serverless_backend import ServerlessBackend

__all__ = ["ServerlessBackend"]
