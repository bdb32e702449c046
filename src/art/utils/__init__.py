"""Small helpers for training scripts, and names that older code imports from here.

Older code also imports each function from a module of its name. The modules are imported here first, so that
`art.utils.retry` stays the function.
"""

from art.compat.refused import refusals
from art.utils import litellm
from art.utils.format_message import format_message
from art.utils.get_model_step import get_model_step
from art.utils.get_repo_root_path import get_repo_root_path
from art.utils.iterate_dataset import DatasetBatch, iterate_dataset
from art.utils.limit_concurrency import limit_concurrency
from art.utils.retry import retry
from art.utils.strip_logprobs import strip_logprobs

__all__ = [
    "DatasetBatch",
    "format_message",
    "get_model_step",
    "get_repo_root_path",
    "iterate_dataset",
    "limit_concurrency",
    "litellm",
    "retry",
    "strip_logprobs",
]

__getattr__ = refusals(__name__)
