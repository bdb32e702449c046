"""`art.compat.strip_logprobs` under the name that older code uses."""

from art.compat.strip_logprobs import strip_logprobs

__all__ = ["strip_logprobs"]
