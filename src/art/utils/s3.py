"""Refuses the S3 helpers of older code, and says what to use today."""

from art.compat.refused import refusals

__getattr__ = refusals(__name__)
