"""The module from which older code imports `strip_logprobs`; today it is in `art.utils`."""

from art.compat.utils import strip_logprobs

__all__ = ["strip_logprobs"]
