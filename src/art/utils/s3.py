"""Raises an error for the S3 helpers that older code imports from here, which says what to use today."""

from art.compat.refused import refusals

__getattr__ = refusals(__name__)
