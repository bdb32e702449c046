"""`art.utils.strip_logprobs` under the name that older code uses."""

from art.compat.utils import strip_logprobs

__all__ = ["strip_logprobs"]
