"""Small helpers for training scripts."""

from art.utils import litellm
from art.utils.concurrency import limit_concurrency
from art.utils.dataset import DatasetBatch, iterate_dataset
from art.utils.formatting import format_message
from art.utils.retrying import retry
from art.utils.steps import get_model_step

__all__ = [
    "DatasetBatch",
    "format_message",
    "get_model_step",
    "iterate_dataset",
    "limit_concurrency",
    "litellm",
    "retry",
]
