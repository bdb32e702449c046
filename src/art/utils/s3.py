"""Where older code looks for helpers for S3: an import says what to use today."""

from art.compat.refused import refusals

__getattr__ = refusals(__name__)
