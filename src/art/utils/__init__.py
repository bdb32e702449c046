"""Small helpers for training scripts, and names that older code imports from here."""

from art.compat.refused import refusals
from art.compat.utils import get_model_step, get_repo_root_path, strip_logprobs
from art.utils import litellm
from art.utils.concurrency import limit_concurrency
from art.utils.dataset import DatasetBatch, iterate_dataset
from art.utils.formatting import format_message
from art.utils.retrying import retry

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
