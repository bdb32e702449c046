"""Small helpers for training scripts."""

from art.compat.refused import refusals
from art.utils import litellm
from art.utils.concurrency import limit_concurrency
from art.utils.dataset import DatasetBatch, iterate_dataset
from art.utils.formatting import format_message
from art.utils.get_repo_root_path import get_repo_root_path
from art.utils.retrying import retry
from art.utils.steps import get_model_step
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
