"""Raises an error for `deploy_model`, which older code imports from here, that says what to use today."""

from art.compat.refused import refusals

__getattr__ = refusals(__name__)
